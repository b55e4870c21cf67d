"""What the leader and the node agree on about a transfer."""
