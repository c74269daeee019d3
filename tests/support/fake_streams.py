"""A fake torch.cuda whose streams and events share a simulated clock."""

from __future__ import annotations

from typing import Any

MS = 1_000_000
COMPUTING = 7
"""The handle of the stream that computes."""


class FakeEvent:
    """An event that is recorded at the time of the fake GPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._at_ns = 0

    def record(self, stream: Any = None) -> None:
        self._at_ns = self._cuda.gpu_ns

    def query(self) -> bool:
        return not self._cuda.is_behind

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end._at_ns - self._at_ns) / MS


class FakeCuda:
    """A torch.cuda whose GPU has a clock that waits move."""

    def __init__(self) -> None:
        self.gpu_ns = 0
        self.is_capturing = self.is_behind = self.is_starved = False
        self.waited: list[tuple[int, Any]] = []
        cuda = self

        class Stream:
            def __init__(self, cuda_stream: int) -> None:
                self.cuda_stream = cuda_stream

            def wait_event(self, event: Any) -> None:
                """Wait."""
                if isinstance(event, Exception):
                    raise event
                cuda.gpu_ns += event
                cuda.waited.append((self.cuda_stream, event))

            def query(self) -> bool:
                return cuda.is_starved

        self.Stream = Stream

    def current_stream(self, device: int) -> Any:
        assert device == 1
        return self.Stream(COMPUTING)

    def current_device(self) -> int:
        return 1

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)
