"""Where memory is: the ledgers of GPU and host, what ZeRO should need, allocations. Detectors: ``annotations.memory``."""
