"""Parts of the demonstration: a volume is filled, moved out and back, and compared."""
