"""The stand-ins for torch's counters: our windows are exact, and nobody else can tell that we reset."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop_probe.inside.device.peak_counters import PeakCounters

DEVICE = 3
NAMES = ("allocated_bytes", "reserved_bytes")


class Counters:
    """The counters of one device with the rules of PyTorch's: a peak follows, and a reset sets it to the current."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {name: {"all": {"current": 0, "peak": 0}} for name in NAMES}
        self.stats["oversize_segments"] = {"current": 0, "peak": 0}
        self.stats["num_ooms"] = 0

    def list_counters(self) -> list[dict[str, int]]:
        return [*(self.stats[name]["all"] for name in NAMES), self.stats["oversize_segments"]]

    def add_amount(self, number: int, amount: int) -> None:
        counter = self.list_counters()[number]
        counter["current"] = max(0, counter["current"] + amount)
        counter["peak"] = max(counter["peak"], counter["current"])

    def read_stats(self) -> dict[str, Any]:
        return copy.deepcopy(self.stats)

    def reset_peaks(self) -> None:
        for counter in self.list_counters():
            counter["peak"] = counter["current"]


def make_binding(devices: dict[int, Counters]) -> Any:
    """What ``torch._C`` has of it."""

    def read_device(device: int) -> dict[str, Any]:
        return devices[device].read_stats()

    def reset_device(device: int) -> None:
        devices[device].reset_peaks()

    names = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
    resets = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    return SimpleNamespace(**dict.fromkeys(names, read_device), **dict.fromkeys(resets, reset_device))


CHANGE = st.tuples(st.just("add"), st.integers(0, 2), st.integers(-100, 100))
OTHERS = ("read", "accelerator read", "reset", "accelerator reset", "boundary", "tick")
ACTIONS = st.lists(st.one_of(CHANGE, st.sampled_from(OTHERS)), max_size=60)


@given(ACTIONS)
def test_the_job_sees_what_it_would_have_seen_and_we_see_each_window(actions: list[Any]) -> None:
    ours, truth = Counters(), Counters()
    torch_c = make_binding({DEVICE: ours})
    peaks = PeakCounters(torch_c, DEVICE)
    peaks.install_functions()
    window = 0  # the highest allocated since the last boundary, counted here
    for action in actions:
        if isinstance(action, tuple):
            ours.add_amount(*action[1:])
            truth.add_amount(*action[1:])
            window = max(window, truth.stats["allocated_bytes"]["all"]["current"])
        elif action.endswith("reset"):
            (torch_c._cuda_resetPeakMemoryStats if action == "reset" else torch_c._accelerator_resetPeakStats)(DEVICE)
            truth.reset_peaks()
        elif action.endswith("read"):
            read = torch_c._cuda_memoryStats if action == "read" else torch_c._accelerator_getDeviceStats
            assert read(DEVICE) == truth.stats
        else:
            stats = peaks.read_and_reset() if action == "boundary" else peaks.read_stats()
            assert stats["allocated_bytes"]["all"]["peak"] == window
            assert stats["allocated_bytes"]["all"]["current"] == truth.stats["allocated_bytes"]["all"]["current"]
            if action == "boundary":
                window = truth.stats["allocated_bytes"]["all"]["current"]
    assert torch_c._cuda_memoryStats(DEVICE) == truth.stats


def test_other_devices_are_none_of_our_business() -> None:
    other = Counters()
    torch_c = make_binding({DEVICE: Counters(), 0: other})
    peaks = PeakCounters(torch_c, DEVICE)
    peaks.install_functions()
    other.add_amount(0, 50)
    other.add_amount(0, -20)
    peaks.read_and_reset()
    assert torch_c._cuda_memoryStats(0)["allocated_bytes"]["all"] == {"current": 30, "peak": 50}
    torch_c._cuda_resetPeakMemoryStats(0)
    assert torch_c._cuda_memoryStats(0)["allocated_bytes"]["all"] == {"current": 30, "peak": 30}


def test_errors_are_those_of_torch() -> None:
    torch_c = make_binding({DEVICE: Counters()})
    PeakCounters(torch_c, DEVICE).install_functions()
    with pytest.raises(KeyError):
        torch_c._cuda_memoryStats(7)


def test_an_older_torch_and_a_removal() -> None:
    counters = Counters()
    torch_c = make_binding({DEVICE: counters})
    del torch_c._accelerator_getDeviceStats, torch_c._accelerator_resetPeakStats
    before = dict(vars(torch_c))
    peaks = PeakCounters(torch_c, DEVICE)
    peaks.install_functions()
    assert vars(torch_c).keys() == before.keys()
    assert vars(torch_c) != before
    peaks.restore_functions()
    assert vars(torch_c) == before
