"""The engines: they call a method's hooks and never ask for its name."""
