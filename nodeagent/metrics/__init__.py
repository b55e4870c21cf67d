"""The metrics of an agent: a table of them, and the registry that keeps their values."""
