"""Any process dies while data moves, on a real kubelet: longer than what every change has to pass."""
