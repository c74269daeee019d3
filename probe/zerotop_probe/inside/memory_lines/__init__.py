"""Which lines allocate device memory: a look at a step when memory creeps or has a new peak. Python 3.9, no other library."""
