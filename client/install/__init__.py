"""Installation of the agents: the objects that it consists of, and how they get into a cluster and out of it."""
