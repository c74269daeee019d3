"""A recording up to a cursor by process and node, and what detectors remember of it. ``evidence`` gives access to it."""
