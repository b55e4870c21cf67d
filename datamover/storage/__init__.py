"""The storages of backup repositories, and the credentials for them."""
