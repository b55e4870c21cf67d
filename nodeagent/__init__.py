"""The per-node daemon: admits loads, exposes volumes, watches movers, reports."""
