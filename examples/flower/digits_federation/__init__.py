"""A federation that keeps what it has learned."""
