"""Transfers and faults at random, for as long as one likes: every transfer ends, explained, and nothing is left."""
