"""Parts of `make bench-bandwidth`: what the data mover exchanges with a storage while its bandwidth is limited."""
