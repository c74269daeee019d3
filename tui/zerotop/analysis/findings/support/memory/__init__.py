"""The use of device memory, for detectors: the largest allocated blocks, the peaks of phases, the batches of evaluations."""
