"""The kopia program: its process, its repositories and snapshots."""
