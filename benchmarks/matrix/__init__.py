"""Every method, every feature, one graph: what works, measured, and PEFT beside it on the same work."""
