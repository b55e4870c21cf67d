"""The per-node daemon: admits transfers, exposes volumes, watches movers and reports progress."""
