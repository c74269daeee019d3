"""Causes of slower steps: the part of the iteration that changed, and what else changed then. Contains no detector."""
