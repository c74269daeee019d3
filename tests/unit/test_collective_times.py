"""How long a rank's GPU is in collectives: what the probe records of PyTorch's flight recorder, and when it asks it."""

from __future__ import annotations

import itertools
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from declared_events import check_event
from zerotop_probe.inside.device import collective_times
from zerotop_probe.inside.device.collective_times import BLOCK, CollectiveTimes, fits_budget, summarize_groups
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.recording import events

S = 1_000_000_000


def make_entry(number: int, spent_ms: float | None = 1.0, *, every_ns: int = S // 10, **changes: Any) -> dict[str, Any]:
    """Return an entry as PyTorch 2.11 dumps it, of a collective that is launched at a tenth of a second times its number."""
    entry = {
        "collective_seq_id": number,
        "input_dtypes": ["BFloat16"],
        "input_sizes": [[1024, 2]],
        "is_p2p": False,
        "output_dtypes": ["BFloat16"],
        "output_sizes": [[512, 2]],
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:_reduce_scatter_base",
        "record_id": number + 5,
        "time_created_ns": 100 * S + number * every_ns,
    }
    return entry | ({} if spent_ms is None else {"duration_ms": spent_ms}) | changes


def test_whole_blocks_are_summed() -> None:
    entries = [make_entry(number) for number in range(3, 3 * BLOCK + 5)]
    entries[BLOCK] |= {"profiling_name": "nccl:all_reduce", "duration_ms": 5.0}
    recorded = {"entries": entries, "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}
    (group,) = summarize_groups(recorded, -100 * S)
    assert (group["group"], group["ranks"], group["numbers"]) == ("0", [0, 1], [1, 2])  # neither the first nor the last one
    assert group["bytes"] == [BLOCK * 4096, BLOCK * 4096]  # of what is given to the scatter, not of the part that is got
    assert group["spent_ns"] == {"_reduce_scatter_base": [(BLOCK - 1) * 10**6, BLOCK * 10**6], "all_reduce": [5 * 10**6, 0]}
    assert group["launched_ns"] == [round((1.5 * BLOCK - 0.5) * S / 10), round((2.5 * BLOCK - 0.5) * S / 10)]


@pytest.mark.parametrize("changes", [{"is_p2p": True}, {"duration_ms": None}, {"collective_seq_id": None}])
def test_blocks_with_collectives_that_have_no_time_are_left_out(changes: dict[str, Any]) -> None:
    entries = [make_entry(number) for number in range(2 * BLOCK)]
    entries[1] |= changes
    (group,) = summarize_groups({"entries": entries}, 0)
    assert (group["numbers"], group["ranks"]) == ([1], [])  # a recorder of other versions does not tell the ranks
    assert summarize_groups({"entries": [entry | changes for entry in entries]}, 0) == []
    assert summarize_groups({}, 0) == []


def test_only_what_the_budget_allows_is_timed() -> None:
    assert fits_budget([make_entry(number, every_ns=4_000_000) for number in range(100)], 0.0015)
    assert not fits_budget([make_entry(number, every_ns=2_000_000) for number in range(100)], 0.0015)
    assert not fits_budget([], 1.0)


class FakeGroup:
    def __init__(self) -> None:
        self.is_timing = False

    def _enable_collectives_timing(self) -> None:
        self.is_timing = True


class FakeTorch:
    """A PyTorch whose flight recorder holds the last 100 collectives, which are launched at 50 in a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = [FakeGroup(), object()]
        self.is_capturing = False
        self.dumps = 0
        self.count = 0
        module = SimpleNamespace(_dump_nccl_trace=self.dump)
        self._C = SimpleNamespace(_distributed_c10d=module)
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.is_capturing)
        world = SimpleNamespace(_world=SimpleNamespace(pg_map=dict.fromkeys(self.groups)))
        monkeypatch.setitem(sys.modules, "torch", self)
        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", world)

    def dump(self, **options: bool) -> bytes:
        assert options == {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
        self.dumps += 1
        first = getattr(self.groups[0], "is_timing", False)
        entries = [
            make_entry(number, 1.0 if first else None, every_ns=S // 50)
            for number in range(max(0, self.count - 100), self.count)
        ]
        return pickle.dumps({"entries": entries})


class Looks:
    """The looks of a rank at a time that stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = FakeTorch(monkeypatch)
        self.written: list[dict[str, Any]] = []
        self.meter = CostMeter()
        self.errors: list[BaseException] = []
        self.meter.report_error = lambda where, error: self.errors.append(error)
        self.passed_ns = 0
        monkeypatch.setattr(collective_times, "now", lambda: now() + self.passed_ns)
        begin_ns = 1_800_000_000 * S + 3 * S
        monkeypatch.setattr("zerotop_probe.inside.device.collective_times.time.time_ns", lambda: begin_ns + self.passed_ns)
        self.times = CollectiveTimes(self.write, self.meter)

    def write(self, time_ns: int, event: str, **facts: Any) -> None:
        check_event({"time_ns": time_ns, "event": event, **facts})
        self.written.append(facts | {"event": event, "passed_s": self.passed_ns / S})

    def train(self, seconds: int) -> list[float]:
        """Train for so long; return when it was looked, in seconds since the begin."""
        looked = []
        for _ in range(seconds):
            self.passed_ns += S
            self.torch.count += 50
            if self.times.is_due(now() + self.passed_ns):
                looked.append(self.passed_ns / S)
                self.times.end_step(now() + self.passed_ns, 7)
        return looked


def test_it_is_looked_rarely_and_at_the_same_times_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looked = looks.train(1000)
    assert all((3 + time) % 10 <= 1 for time in looked)  # the clock says 3 s at the begin
    between = [later - earlier for earlier, later in itertools.pairwise(looked)]
    assert looked[0] > 10
    assert between[:2] == [10, 30]
    assert between[-1] == 240
    assert len(looked) <= 8
    assert looks.torch.groups[0].is_timing  # type: ignore[attr-defined]
    # The first look only begins the timing.
    assert [one["passed_s"] for one in looks.written] == looked[1:]
    assert {one["event"] for one in looks.written} == {events.COLLECTIVE_TIMES}
    assert (looks.written[0]["timed"], looks.written[0]["block"]) == (500, BLOCK)
    cost_ns = 4000 * sum(one["timed"] for one in looks.written)
    assert looks.meter.threads_ns == cost_ns  # what PyTorch does is a part of the cost that is shown
    assert not looks.errors


def test_nothing_is_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.torch.is_capturing = True
    looks.train(60)
    assert not looks.torch.dumps
    looks.torch.is_capturing = False
    looks.train(60)
    assert looks.written


def test_many_short_collectives_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    monkeypatch.setenv("PYTHONZEROTOP_BUDGET", "0.01")
    looked = looks.train(600)
    assert len(looked) == looks.torch.dumps == 4
    assert not looks.torch.groups[0].is_timing  # type: ignore[attr-defined]
    assert not looks.written


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.torch._C._distributed_c10d._dump_nccl_trace = lambda **_: b"not a pickle"
    assert len(looks.train(100)) == 1
    assert len(looks.errors) == 1


def test_a_pytorch_without_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.torch._C = SimpleNamespace()
    assert len(looks.train(600)) == 4
    assert not looks.errors
    assert not looks.written
