"""The client: what people run. It reads and creates objects in the cluster, and opens repositories through Jobs.

Whatever sends requests raises KubeError if the API server rejects one or does not answer; docstrings do not repeat it.
"""
