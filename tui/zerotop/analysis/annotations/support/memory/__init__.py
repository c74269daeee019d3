"""What device memory was used for: the largest allocated blocks, the phases of peaks. Contains no detector."""
