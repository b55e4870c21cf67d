"""Releases of Velero beside this agent, on a real API server."""
