"""The program in a browser: the server, who may see it, and what it serves."""
