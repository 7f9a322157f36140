"""Experiments as files: reading, overriding, building, running, resuming and sweeping."""
