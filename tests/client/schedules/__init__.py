"""Tests of `client.schedules`."""
