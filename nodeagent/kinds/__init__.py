"""One small adapter for each kind of load."""
