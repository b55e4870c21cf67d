"""Parts of the benchmark of interrupted transfers: one module for each direction, and what both need."""
