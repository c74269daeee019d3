"""Names in the ``stacks`` event: why stacks were sampled, and where if not in a phase."""

from __future__ import annotations

SLOW, SHARE, SILENT = "slow", "share", "silent"
BETWEEN_PHASES, UNKNOWN_PHASE = "between phases", "unknown phase"
