"""Custom resources, phases and every name on the wire; no I/O."""
