"""The four kinds of transfers, one adapter each."""
