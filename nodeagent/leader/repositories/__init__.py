"""BackupRepositories made ready."""
