"""One backup or restore through kopia, in either mode."""
