"""The commands for users, one module for each."""
