"""The commands: what follows a program's name, and what it means."""
