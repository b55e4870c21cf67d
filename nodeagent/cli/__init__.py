"""The commands of the agent itself."""
