"""The client: what people run. It reads and creates objects in the cluster, and opens repositories through Jobs."""
