"""The agent on each node: admits transfers, exposes volumes, watches movers and reports progress."""
