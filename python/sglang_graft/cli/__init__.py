"""The `graft` command and the demo that it carries."""
