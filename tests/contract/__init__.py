"""One suite for the fake API server and a real one, so that both behave alike."""
