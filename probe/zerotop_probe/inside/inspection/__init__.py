"""Reads from the objects of the job: batch sizes, shards, quantized tensors, the library, identity. Knows no probe."""
