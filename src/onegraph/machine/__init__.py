"""What this machine has, asked without torch, because torch may be what is broken."""
