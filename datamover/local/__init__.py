"""Local mode: the data mover as a person runs it, without a cluster."""
