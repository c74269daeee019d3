"""Reads from the job's objects: batch sizes, shards, quantized tensors, library, identity. Does not use the probe."""
