"""What is here, what would be compiled, and what to do about it. Nothing here imports torch: that may be what is broken."""
