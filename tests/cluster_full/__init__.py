"""Whatever dies in mid-transfer, on a real kubelet: longer than what every change has to pass."""
