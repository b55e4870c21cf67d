"""Which PVCs have how recent a backup, for the metrics."""
