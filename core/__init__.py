"""Shared by all processes of the project: models, the mover contract, the API client."""
