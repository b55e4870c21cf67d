"""How uploads and restores do with a storage that is far away."""
