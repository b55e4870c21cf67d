"""Brings volumes to data mover pods: builders make manifests, exposers send them."""
