"""Recordings as one file: packing, and unpacking of files that may be damaged or hostile."""
