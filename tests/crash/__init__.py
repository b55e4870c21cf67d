"""Agents that are stopped at every write they make, before a real kube-apiserver."""
