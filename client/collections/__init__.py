"""Backups and restores, found, waited for and canceled by one code."""
