"""The rank's GPU: allocator counters, peaks, CUDA events, tensors, out-of-memory. Standard library only, Python 3.9+."""
