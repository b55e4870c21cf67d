"""The API client: transport, errors, retries, list and watch, Events."""
