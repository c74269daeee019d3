"""Recordings as one file: packing, and unpacking what may be damaged or hostile."""
