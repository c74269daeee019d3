"""A recording up to a cursor, by process and node, and the memory of detectors. ``evidence`` gives access to it."""
