"""What device memory was used for: the largest allocated blocks, the peaks of phases. Contains no detector."""
