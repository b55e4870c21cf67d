"""Random transfers and faults: every transfer becomes final, its message names its fault, and nothing is leaked."""
