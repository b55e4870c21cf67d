"""Tests of the package exposer."""
