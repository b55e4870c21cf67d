"""What `nodeagent status` and `nodeagent describe` read and judge: frozen records, and pure functions over them."""
