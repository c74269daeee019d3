"""``zerotop serve``: the web server, its access check, and the process of a browser window."""
