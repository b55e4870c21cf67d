"""The agent's HTTP server."""
