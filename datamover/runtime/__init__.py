"""What a mover runs on; nothing here knows about kopia."""
