"""What `nodeagent backup` does: backups of volumes without a Velero server, made of transfers like any client's."""
