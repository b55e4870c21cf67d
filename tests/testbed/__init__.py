"""Tests of those parts of the test bed and of the demonstration that need no cluster."""
