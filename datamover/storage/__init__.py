"""From a location and credentials to how kopia reaches a bucket."""
