"""Sets of cores, and the lists in which the kernel writes them."""

from __future__ import annotations

Cores = frozenset[int]
NO_CORES: Cores = frozenset()
_MAX_CORE = 1 << 16  # no machine has more; a damaged recording may say so


def parse_cores(text: str) -> Cores:
    """Parse ``0-3,8`` as {0, 1, 2, 3, 8}; skip invalid parts."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), min(int(last or first), _MAX_CORE) + 1))
    return frozenset(cores)
