"""Front processes: the endpoint in processes of its own, on one port, all clients of one runtime."""
