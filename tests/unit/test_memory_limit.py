"""A process that may use only a fraction of its GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from small_recording import make_identity
from zerotop.recording.moments.devices import find_limit
from zerotop_probe.inside.facts.engine_facts import read_devices
from zerotop_probe.recording.events import EngineFacts, OutOfMemory

torch = pytest.importorskip("torch")


def test_the_limit_is_that_of_the_last_failure_or_of_the_engine() -> None:
    engine = EngineFacts({"devices": [{"ordinal": 0, "total_bytes": 80 << 30, "limit_bytes": 20 << 30}]})
    failures = [OutOfMemory({"limit_bytes": size << 30}, 0, make_identity(0)) for size in (12, 79)]
    assert find_limit(80 << 30, engine, failures[:1]) == 12 << 30
    assert find_limit(80 << 30, engine, []) == 20 << 30
    assert find_limit(80 << 30, None, failures[1:]) is None


def test_the_probe_records_the_fraction_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fraction, and with an allocator that has none, there is no limit."""
    properties = SimpleNamespace(name="GPU", total_memory=80 << 30, uuid="1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def read_limit(fraction: float | None) -> int | None:
        def read_fraction(_: int) -> float:
            if fraction is None:
                raise RuntimeError("not supported by this allocator")
            return fraction

        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", read_fraction)
        limit: int | None = read_devices(torch.device("cuda", 0))[0]["limit_bytes"]
        return limit

    assert [read_limit(fraction) for fraction in (0.25, 1.0, None)] == [20 << 30, None, None]
