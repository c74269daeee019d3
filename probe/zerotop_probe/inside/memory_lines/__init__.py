"""The lines that allocate device memory: a look at a step when memory creeps or has a new peak. Standard library only."""
