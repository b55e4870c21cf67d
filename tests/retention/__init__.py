"""Retention at random: what no order of backups, losses, wrong clocks, kills and commands may delete."""
