"""Loads and faults at random, for as long as one likes: every load ends, explained, and nothing is left."""
