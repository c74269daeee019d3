"""The GPUs of this machine, divided among the points of a sweep: each point runs on its own set."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.sweeps.settings import GPUS, OFFLOAD
from zerotop.recording.sweeps import Plan, Point

_NO_OFFLOAD = "none"
_NO_GPU = ("",)  # a machine without GPUs is one set


class GpuSets:
    """Takes sets of GPUs for points, and gets them back."""

    def __init__(self, plan: Plan, gpus: Sequence[str]) -> None:
        """``gpus``: as in ``CUDA_VISIBLE_DEVICES``; empty for training on the CPU."""
        self._plan = plan
        self._gpus = tuple(gpus) or _NO_GPU
        self._free = list(self._gpus)

    @property
    def count(self) -> int:
        """The number of all GPUs; 1 without any."""
        return len(self._gpus)

    def take(self, point: Point) -> tuple[str, ...] | None:
        """Take the GPUs that a point needs; None if too few are free."""
        needed = self._count_needed(point)
        if needed > len(self._free):
            return None
        taken, self._free = tuple(self._free[:needed]), self._free[needed:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        """Note that a point has ended."""
        self._free = [gpu for gpu in self._gpus if gpu in self._free or gpu in gpus]

    def list_visible(self, taken: Sequence[str]) -> tuple[str, ...]:
        """Return the GPUs to show to a point that has ``taken`` these; empty to leave the environment as it is."""
        return () if len(taken) == self.count else tuple(taken)

    def _count_needed(self, point: Point) -> int:
        """Return the number of GPUs that a point occupies: all, if it is unknown or the point uses the host heavily."""
        section = self._plan.config.get("zero_optimization", {})
        offloads = point.settings.get(OFFLOAD, _NO_OFFLOAD) != _NO_OFFLOAD or "offload" in str(section)
        is_open = bool(self._plan.command) and (GPUS not in point.settings or self._has_deepspeed_launcher())
        return self.count if offloads or is_open else min(int(point.settings.get(GPUS, 1)), self.count)

    def _has_deepspeed_launcher(self) -> bool:
        """Return whether DeepSpeed's launcher chooses the GPUs: with ``--num_gpus`` it ignores CUDA_VISIBLE_DEVICES."""
        return any("deepspeed" in word.rpartition("/")[2] for word in self._plan.command[:3])
