"""The Memory screen: ledger, peaks, allocations. The figures are from ``analysis.memory``."""
