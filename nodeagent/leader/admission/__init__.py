"""Whether a New transfer may start, and when."""
