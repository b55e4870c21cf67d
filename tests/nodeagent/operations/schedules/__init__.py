"""Tests of `nodeagent.operations.schedules`."""
