"""Maintenance of backup repositories, in namespaces without a Velero server."""
