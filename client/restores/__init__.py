"""What `nodeagent restore` does, and the list of what a bucket holds: volumes of a backup become new PVCs."""
