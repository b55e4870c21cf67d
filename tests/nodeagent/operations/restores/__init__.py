"""Tests of `nodeagent.operations.restores`."""
