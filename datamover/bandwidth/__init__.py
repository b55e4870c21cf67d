"""Limits of the bytes that kopia exchanges with a storage: a proxy that it reaches the storage through."""
