"""What runs in the leader only: the agent that holds the Lease."""
