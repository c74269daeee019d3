"""The rows at the top and the bottom of every screen: header, tabs, seek bar, and keys taken from the bindings."""
