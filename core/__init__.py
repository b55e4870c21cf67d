"""What every process of the project shares: models, the mover contract, the API client."""
