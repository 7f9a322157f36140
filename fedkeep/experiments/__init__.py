"""Experiments as files: reading, overriding, running, resuming and sweeping them."""
