"""BackupRepositories made ready, and BackupStorageLocations validated."""
