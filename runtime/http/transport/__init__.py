"""How connections are taken: sockets, TLS, keys, and faults below the routes."""
