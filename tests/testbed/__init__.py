"""Tests of those parts of the bed and of the demonstration that need no cluster."""
