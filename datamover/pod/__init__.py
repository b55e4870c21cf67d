"""Pod mode: the data mover as the node agent starts it."""
