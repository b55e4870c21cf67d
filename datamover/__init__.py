"""The data mover: backs up or restores one volume through kopia, in a pod or in local mode."""
