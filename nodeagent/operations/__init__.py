"""What commands for users do: they read and create objects in the cluster, like any client."""
