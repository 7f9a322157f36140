"""The version of fedkeep."""

__version__ = "0.1.0"
