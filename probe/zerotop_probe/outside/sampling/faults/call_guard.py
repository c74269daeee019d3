"""Driver calls that do not return: a sick GPU may hold a thread forever, while the others have to be sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from zerotop_probe.outside.sampling.nvml import GpuDevice
from zerotop_probe.outside.sampling.sampler_thread import Sampler, SamplerThread

# A call that takes longer (seconds) is said not to return. Calls take microseconds, rarely some milliseconds.
PATIENCE_S = 3.0
# Between two looks at a call at most so many seconds count.
_LONGEST_LOOK_S = 0.5
# How often a GPU is sampled again after a call on it has returned so late.
_MOST_RETURNS = 10

Answer = TypeVar("Answer")


class CallAbandoned(Exception):
    """A call returned so late that another thread has taken over."""

    def __init__(self, device: GpuDevice, seconds: float) -> None:
        super().__init__(f"a call on GPU {device.gpu.index} took {seconds:.1f} s")
        self.device = device
        self.seconds = seconds


class StandstillTimer:
    """Adds up how long something stays the same while it is looked at; a pause of this process (Ctrl-Z) is left out."""

    def __init__(self) -> None:
        self._what: object = None
        self._looked_s = self._seconds = 0.0

    def measure(self, what: object) -> float:
        """Return for how many seconds it has been this object; 0 for None."""
        now_s = time.monotonic()
        is_same = what is not None and what is self._what
        self._seconds = self._seconds + min(now_s - self._looked_s, _LONGEST_LOOK_S) if is_same else 0.0
        self._what, self._looked_s = what, now_s
        return self._seconds


class CallGuard:
    """Knows since when a thread waits for the driver, and for which GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: tuple[GpuDevice, float] | None = None
        self._timer = StandstillTimer()

    def call_driver(self, device: GpuDevice, query: Callable[[], Answer]) -> Answer:
        """Return the answer of a query. Raises CallAbandoned if :meth:`take_blocked` has reported it meanwhile."""
        call = self._call = device, time.monotonic()
        try:
            return query()
        finally:
            with self._lock:
                is_abandoned = self._call is not call
                if not is_abandoned:
                    self._call = None
            if is_abandoned:
                raise CallAbandoned(device, time.monotonic() - call[1])

    def take_blocked(self) -> tuple[GpuDevice, float] | None:
        """Return the GPU of a call that has not returned in time, and how long it lasts; its thread has to be replaced."""
        with self._lock:
            call = self._call
            if (seconds := self._timer.measure(call)) < PATIENCE_S or call is None:
                return None
            self._call = None
            return call[0], seconds


class GuardedSampler(Sampler, Protocol):
    """A sampler whose driver calls go through a guard."""

    guard: CallGuard

    def leave_out(self, device: GpuDevice) -> None:
        """Sample a GPU no longer. Called by another thread."""

    def take_back(self, device: GpuDevice) -> None:
        """Sample it again. Called by another thread."""


class _Resumed:
    """A sampler in another thread than the one that prepared it."""

    def __init__(self, sampler: Sampler) -> None:
        self.take_sample, self.close = sampler.take_sample, sampler.close

    def prepare_sampling(self) -> None:
        """Do nothing: the sampler is prepared."""


class GuardedThread:
    """Runs a sampler of GPUs. A GPU whose call does not return is left out, and another thread goes on with the others."""

    def __init__(
        self,
        name: str,
        sampler: GuardedSampler,
        *,
        on_error: Callable[[str, BaseException], None],
        on_silent: Callable[[GpuDevice, float, bool], None],
    ) -> None:
        """``on_silent`` receives the GPU, how long the call had lasted (seconds), and whether it has returned."""
        self._sampler = sampler
        self._on_error = on_error
        self._on_silent = on_silent
        self._returns: dict[int, int] = {}
        self._name = name
        self._thread = SamplerThread(name, sampler, on_error=self._note_end)

    def start_sampling(self) -> None:
        """Start the thread."""
        self._thread.start_sampling()

    def request_sample(self, time_ns: int, number: int) -> None:
        """Request a sample; return at once."""
        self._thread.request_sample(time_ns, number)

    def check_calls(self) -> None:
        """Replace the thread if its call does not return."""
        if (blocked := self._sampler.guard.take_blocked()) is not None:
            device, seconds = blocked
            self._sampler.leave_out(device)
            self._on_silent(device, seconds, False)
            self._thread = SamplerThread(self._name, _Resumed(self._sampler), on_error=self._note_end)
            self._thread.start_sampling()

    def finish_sampling(self, timeout_s: float) -> None:
        """As of the thread."""
        self._thread.finish_sampling(timeout_s)

    def _note_end(self, name: str, error: BaseException) -> None:
        if not isinstance(error, CallAbandoned):
            self._on_error(name, error)
            return
        index = error.device.gpu.index
        self._returns[index] = self._returns.get(index, 0) + 1
        if self._returns[index] <= _MOST_RETURNS:
            self._on_silent(error.device, error.seconds, True)
            self._sampler.take_back(error.device)
