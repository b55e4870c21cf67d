"""What leader and client both know about the maintenance of repositories."""
