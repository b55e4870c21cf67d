"""Tests of `client.restores`."""
