"""The mover as a person starts it: on a folder, without a cluster."""
