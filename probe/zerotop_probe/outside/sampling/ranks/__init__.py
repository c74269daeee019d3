"""Finds the ranks of a job on this node, and says why one has not reported yet. Does not sample them."""
