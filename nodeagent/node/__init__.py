"""What runs in every agent: the transfers of its own node."""
