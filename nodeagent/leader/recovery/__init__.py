"""Transfers and objects without a live owning agent."""
