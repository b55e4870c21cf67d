"""Whether volumes are protected: what leader and client both know about the backups that are expected of each."""
