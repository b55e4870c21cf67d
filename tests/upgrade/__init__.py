"""An update of the agents and its undoing while data moves, on a real kubelet: the manifests of two versions."""
