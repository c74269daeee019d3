"""Stacks of ranks whose Python does not run, as in C code that keeps the interpreter's lock; read with py-spy."""
