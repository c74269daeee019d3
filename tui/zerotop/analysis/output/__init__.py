"""The lines that the job printed, their steps, and searching them. Reading the bytes is in ``session``."""
