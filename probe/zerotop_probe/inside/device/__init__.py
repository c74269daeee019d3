"""The rank's GPU: allocator, CUDA events, tensors, out-of-memory errors. Standard library only, Python 3.9 and newer."""
