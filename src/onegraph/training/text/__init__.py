"""Training adapters of language models."""
