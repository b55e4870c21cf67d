"""Makes volumes reachable from data mover pods: builders return manifests, exposers send them."""
