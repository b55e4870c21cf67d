"""Tests beside unmodified Velero servers of several releases, on a real kubelet."""
