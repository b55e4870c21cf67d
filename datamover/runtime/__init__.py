"""Processes, signals, resources and files of a data mover; nothing here knows kopia."""
