"""Memory ledgers of GPU and host, expected bytes under ZeRO, and allocations. Detectors: ``findings.memory``."""
