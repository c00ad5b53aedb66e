"""What runs inside an engine process: the Engine protocol, the threads around it, and the engines themselves."""
