"""Parts of the benchmark of repository maintenance."""
