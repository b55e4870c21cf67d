"""What an agent runs on; nothing here knows about transfers."""
