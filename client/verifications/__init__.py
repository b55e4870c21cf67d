"""What `nodeagent backup verify` does: volumes of a backup are read back, or restored and compared."""
