"""The mover as the agent starts it: in a pod, for one transfer."""
