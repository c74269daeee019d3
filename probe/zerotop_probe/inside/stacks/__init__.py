"""Python stacks of a rank, sampled while it is slow or silent. Standard library only, Python 3.9 and newer."""
