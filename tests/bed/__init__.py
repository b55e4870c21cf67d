"""A real Kubernetes cluster in namespaces of its own, for tests and for the demonstration."""
