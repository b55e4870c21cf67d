"""The process in a data mover pod: one volume, through kopia."""
