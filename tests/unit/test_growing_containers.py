"""Which containers grow while host memory does: what is measured, how they are named, when it is worth a look."""

from __future__ import annotations

import functools
import gc
import json
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

import recordings
from declared_events import check_event
from small_recording import make_identity
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.host.growing_containers import find_container
from zerotop.analysis.findings.support import Process
from zerotop.analysis.formatting import Text
from zerotop.analysis.script_terms import SNAPSHOTS
from zerotop.recording.reader import Recording
from zerotop_probe.inside.growing_containers import container_finder, reachable_values
from zerotop_probe.inside.growing_containers.container_finder import ContainerFinder
from zerotop_probe.inside.growing_containers.containers import find_growing, measure_lengths
from zerotop_probe.inside.growing_containers.host_watch import HostReading, HostWatch
from zerotop_probe.inside.growing_containers.names import OwnerPlace
from zerotop_probe.inside.growing_containers.reachable_values import find_places, find_untracked_dicts
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.events import Event, GrowingContainers, Stacks, TrainingChanged

S, MIB = 1_000_000_000, 1 << 20
HERE = Path(__file__)
PATHS = PathNames(str(HERE.parent), [])
KEPT: list[Any] = list(range(10))


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_others() -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def _own_objects() -> None:
    """Take all other objects out of the collector's sight: going through those of all tests takes half a second a time."""
    gc.freeze()


class Entry(NamedTuple):
    state: torch.Tensor
    step: int

    def __iter__(self) -> Any:
        raise AssertionError("code of the job")


class Store:
    def __init__(self) -> None:
        self.items: list[Any] = list(range(10))
        self.by_step: dict[int, Any] = {0: list(range(10))}


def find_place(value: Any, frame: FrameType | None, paths: PathNames) -> OwnerPlace | None:
    return find_places([value], frame, paths).get(id(value))


class Unruly(type):
    """A metaclass whose classes must not be asked for anything."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError

    def __hash__(cls) -> int:
        raise AssertionError


class Refusing(metaclass=Unruly):
    def __len__(self) -> int:
        raise AssertionError

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError

    def __sizeof__(self) -> int:
        raise AssertionError


@pytest.mark.parametrize(
    ("container", "entries", "size", "entry"),
    [
        (list(range(8)), [torch.zeros(1 << 18) for _ in range(6)], 6 * MIB, "Tensor"),
        (list(range(8)), [(step, {"x": np.zeros(1 << 17)}) for step in range(6)], 6 * MIB, "tuple"),
        (deque(range(8), 99), [Entry(torch.zeros(1 << 18), step) for step in range(6)], 6 * MIB, "Entry"),
        (list(range(8)), [[b"x" * 1024] * 1 + [bytes(1024) for _ in range(1023)] for _ in range(6)], 6 * MIB, "list"),
        (deque(range(8)), [bytes(MIB) for _ in range(20)], 20 * MIB, "bytes"),
        (set(range(8)), [bytes([byte]) * MIB for byte in range(8)], None, ""),
        (list(range(8)), [torch.nn.Linear(512, 512) for _ in range(4)], 4 * MIB, "Linear"),
        (list(range(8)), [Refusing() for _ in range(4)], 0, "Refusing"),
    ],
)
def test_added_entries_are_measured(container: Any, entries: list[Any], size: int | None, entry: str) -> None:
    container = copy(container)
    before = measure_lengths()
    (container.update if type(container) is set else container.extend)(entries)
    (growth,) = [one for one in find_growing(before) if one.container is container]
    assert (growth.length, growth.added) == (8 + len(entries), len(entries))
    assert not growth.keeps_graph
    if size is not None:
        assert growth.entry == entry
        assert size <= growth.added_bytes <= size * 1.3 + 10_000


@pytest.mark.parametrize("limit", [9, 64])
def test_the_newest_results_of_a_cache_count(limit: int) -> None:
    """It is found though Python shows no content of a cache with a limit."""

    @functools.lru_cache(maxsize=limit)
    def load(step: int) -> list[bytes]:
        return [bytes(MIB if step >= 5 else 9)]

    for step in range(5):
        load(step)
    before = measure_lengths()
    for step in range(5, 9):
        load(step)
    (growth,) = [one for one in find_growing(before) if one.container is load]
    assert (growth.length, growth.added, growth.entry) == (9, 4, "list")
    assert growth.added_bytes == pytest.approx(4 * MIB, rel=0.01)
    place = find_place(load, sys._getframe(), PATHS)
    assert place is not None
    assert (place.name, place.scope) == ("load", "local")
    (line,) = container_finder.find_lines(place, load, sys._getframe(), PATHS)
    assert line.line == load.__wrapped__.__code__.co_firstlineno


@pytest.mark.parametrize("container", [{}, OrderedDict(), defaultdict(list)], ids=lambda one: type(one).__name__)
def test_the_newest_values_of_dicts_count(container: Any) -> None:
    container = copy(container)
    container.update((step, [step]) for step in range(8))
    before = measure_lengths()
    container.update((step, [bytes(MIB)]) for step in range(8, 12))
    (growth,) = [one for one in find_growing(before) if one.container is container]
    assert growth.added_bytes == pytest.approx(4 * MIB, rel=0.01)


def test_a_graph_that_is_kept_is_seen() -> None:
    weights = torch.ones(4, requires_grad=True)
    scores = [{"loss": (weights * step).sum()} for step in range(4)]
    before = measure_lengths()
    scores.extend({"loss": (weights * step).sum()} for step in range(4))
    (growth,) = [one for one in find_growing(before) if one.container is scores]
    assert growth.keeps_graph


def test_memory_shared_by_two_entries_counts_once() -> None:
    shared, kept = torch.zeros(1 << 18), list(range(8))
    before = measure_lengths()
    kept.extend((step, shared, shared[: 1 << 10]) for step in range(10))  # type: ignore[misc]
    (growth,) = [one for one in find_growing(before) if one.container is kept]
    assert growth.added_bytes == pytest.approx(MIB, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "of", "viewed"),
    [((1,), 8, True), (range(8), 8, False), ((1, 2), 1, False)],
    ids=["one row of each batch", "all rows", "rows of one block"],
)
def test_views_that_keep_larger_memory(rows: Sequence[int], of: int, viewed: bool) -> None:
    batches, kept = [torch.zeros(8, 1 << 15) for _ in range(of)], deque(range(8), 500)
    before = measure_lengths()
    kept.extend(Entry(batch[row], row) for batch in batches for row in rows)  # type: ignore[misc]
    (growth,) = [one for one in find_growing(before) if one.container is kept]
    assert growth.viewed_bytes == (len(rows) * of * (1 << 17) if viewed else 0)


def test_nothing_is_kept_alive() -> None:
    holder = type("Holder", (list,), {})
    kept = [[holder()] for _ in range(8)]
    references = [weakref.ref(one[0]) for one in kept]
    before = measure_lengths()
    kept.extend([holder()] for _ in range(8))
    find_growing(before)
    find_place(kept, sys._getframe(), PATHS)
    del kept
    gc.collect()
    assert [reference() for reference in references] == [None] * 8


def test_a_local_variable_is_named_and_not_kept() -> None:
    def train() -> tuple[OwnerPlace | None, Any]:
        scores = [[step] for step in range(10)]
        thing = type("Thing", (), {})()
        place = find_place(scores, sys._getframe(), PATHS)
        reference = weakref.ref(thing)
        del thing
        return place, reference()

    place, alive = train()
    name = train.__qualname__ if sys.version_info >= (3, 11) else "train"
    assert place == OwnerPlace("scores", "local", name, HERE.name, own=True, levels=0)
    assert alive is None


def test_globals_attributes_and_their_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_MOST_VALUES", "_MOST_NS"):  # this process may have loaded more than any job
        monkeypatch.setattr(reachable_values, limit, 10**10)
    gc.unfreeze()
    store, frame = Store(), sys._getframe()
    assert find_place(KEPT, None, PATHS) == OwnerPlace("KEPT", "global", __name__, HERE.name, own=True, levels=0)
    place = OwnerPlace("items", "attribute", "Store", HERE.name, own=True, levels=0)
    assert find_place(store.items, frame, PATHS) == place
    Store.__init__.__dict__["no name"] = store.items
    assert find_place(store.items, frame, PATHS) == place
    Store.__init__.__dict__.clear()
    place = OwnerPlace("by_step", "attribute", "Store", HERE.name, own=True, levels=1)
    assert find_place(store.by_step[0], frame, PATHS) == place
    assert find_place([[1], [2]], None, PATHS) is None


def test_a_dict_of_arrays_and_the_cache_of_a_function_are_named() -> None:
    """Before Python 3.14 the collector lists no dict whose values it does not know."""

    @functools.cache
    def embed(index: int) -> bytes:
        return bytes([index]) * (MIB // 4)

    def fill(indices: range) -> None:
        for index in indices:
            embed(index)
            store.by_step[index] = np.full(1 << 15, index)

    gc.unfreeze()
    store, frame = Store(), sys._getframe()
    store.by_step.clear()
    fill(range(8))
    before = measure_lengths(find_untracked_dicts(frame, PATHS))
    fill(range(8, 16))
    growing = [one for one in find_growing(before, find_untracked_dicts(frame, PATHS)) if one.added_bytes > MIB]
    places = find_places([one.container for one in growing], frame, PATHS)
    assert {place.name for place in places.values()} == {"embed", "by_step"}


def watch_memory(megabytes: list[float], *, share: float = 0.003, steps: int = 4) -> list[int]:
    """Return the seconds at which a look is wanted, for the resident memory after each second."""
    watch, wanted = HostWatch(share), []
    for second, size in enumerate(megabytes):
        if watch.is_due(second * S) and watch.add_reading(HostReading(second * S, second * steps, int(size * MIB))):
            watch.end_look(second * S, S // 5, named=True)
            wanted.append(second)
    return wanted


@pytest.mark.parametrize(
    ("megabytes", "wanted"),
    [
        ([1000.0 + 40 * second for second in range(60)], [6]),
        ([1000.0 + 4 * second for second in range(120)], [15]),  # too slow to show within some seconds
        ([1000.0] * 60, []),
        ([1000.0 + 60 * sum(second >= one for one in (10, 18, 40)) for second in range(60)], []),  # buffers and pools
        ([1000.0 + 60 * (second % 3) for second in range(60)], []),
        ([1000.0 + 40 * min(second, 4) for second in range(60)], []),  # the first steps
        ([100_000.0 + 30 * second for second in range(60)], []),  # hardly a share of it
    ],
)
def test_growth_is_looked_at(megabytes: list[float], wanted: list[int]) -> None:
    assert watch_memory(megabytes)[:1] == wanted


def test_a_look_in_vain_is_soon_followed_by_another() -> None:
    watch, readings = HostWatch(0.003), [HostReading(second * S, second * 4, second * 40 * MIB) for second in range(200)]
    assert [one.step for one in readings if watch.add_reading(one)][:1] == [24]
    watch.end_look(7 * S, S // 10, named=False)
    assert [one.step for one in readings if watch.add_reading(one)][:1] == [37 * 4]


def test_looks_stay_in_the_budget() -> None:
    grown = [1000.0 + 40 * second for second in range(3600)]
    assert watch_memory(grown, share=0.0) == []
    assert 2 <= len(watch_memory(grown)) <= 6
    watch = HostWatch(0.003)
    watch.end_look(0, 60 * S, named=False)
    assert not any(watch.add_reading(HostReading(second * S, second * 4, second << 30)) for second in range(600))


def test_a_look_records_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    meter, resident = CostMeter(), 1 << 30
    finder = ContainerFinder(lambda time_ns, name, **facts: written.append({"event": name.event_name, **facts}), meter)
    monkeypatch.setattr(container_finder, "read_held_bytes", lambda: resident)
    monkeypatch.setattr(PathNames, "for_this_process", classmethod(lambda cls: PATHS))
    batches = [torch.zeros(1 << 20) for _ in range(8)]
    for second in range(100):
        batches.extend(torch.zeros(1 << 18) for _ in range(4))
        resident += 8 * MIB
        if finder.is_due(second * S):
            finder.end_step(second * S, second * 4)
    (event,) = written
    check_event({"time_ns": 0, **event})
    (container,) = event["containers"]
    assert (container["name"], container["kind"], container["entry"]) == ("batches", "list", "Tensor")
    assert container["added"] == (event["last_step"] - event["first_step"])
    assert meter.one_time_ns == pytest.approx(event["seconds"] * 1e9)
    assert meter.errors == 0


ADDS = {"added_file": "train.py", "added_line": 42, "added_function": "rank.<locals>.<lambda>"}


@pytest.mark.parametrize(
    ("facts", "headline", "details", "fix"),
    [
        (
            {"keeps_graph": True},
            " in 'losses' on ",
            "the list losses in train() (train.py) grew from 90 to 100 entries, tensors with the graph that computed them.",
            "losses[-1] = losses[-1].item()",
        ),
        ({"keeps_graph": True, "added_bytes": 30 * MIB}, "'losses'", "", "losses[-1] = losses[-1].detach()"),  # no numbers
        ({"keeps_graph": True, "entry": "tuple", **ADDS}, "'losses'", "", "train.py:42"),  # what is in it is unknown
        (
            {"scope": "attribute", "owner": "Store"},
            " in 'losses' on ",
            "the list Store.losses (train.py) grew from 90 to 100 entries.",
            "del self.losses[:-10]",
        ),
        # what the line calls the object is unknown
        ({"scope": "attribute", "owner": "Store", **ADDS}, "'losses'", "", ""),
        ({"kind": "dict"}, "'losses'", "", "while len(losses) > 10: losses.pop(next(iter(losses)))"),
        ({"kind": "set"}, "'losses'", "", ""),
        (
            {"levels": 1, "scope": "global"},
            " in 'losses' on ",
            "a list within losses of train.py grew from 90 to 100 entries.",
            "",
        ),
        ({"name": "a\x1b[31m"}, " a step on ", "", SNAPSHOTS),
        (
            {"kind": "deque", "limit": 200, "added_bytes": 40 * MIB},
            " in 'losses' on ranks 0 and 1",
            "grew from 90 to 100 entries, of at most 200.",
            "",
        ),
        (
            {"added_bytes": 40 * MIB, "viewed_bytes": 2 * MIB, **ADDS},
            " in 'losses' on ranks 0 and 1",
            "train.py:42 adds to it",
            "train.py:42",
        ),
        (
            {"kind": "lru_cache", "limit": 100_000, "added_bytes": 40 * MIB, "added_file": "train.py", "added_line": 9},
            " in 'losses' on ",
            "grew from 90 to 100 entries, of at most 100,000: train.py:9 defines it.",
            "@functools.lru_cache(maxsize=50000)",
        ),
        (
            {"kind": "lru_cache", "limit": 200, "added_bytes": 40 * MIB},
            " in 'losses' on ranks 0 and 1",  # which will not fill the memory
            "grew from 90 to 100 entries, of at most 200.",
            "@functools.lru_cache(maxsize=100)",
        ),
    ],
)
def test_the_finding_names_the_container(
    tmp_path: Path, facts: dict[str, Any], headline: str, details: str, fix: str
) -> None:
    folder = recordings.unpack_to_folder("held-grows", tmp_path)
    recording = Recording.open(folder)
    (before,) = [one for one in detect_findings(recording, recording.end_ns) if one.name == "host_growth"]
    (source,) = [one for one in recording.sources["spans"] if one.rank == before.ranks[0]]
    (path,) = folder.glob(f"events-rank{before.ranks[0]}-*.jsonl")
    container = {"name": "losses", "scope": "local", "owner": "train", "file": "train.py", "own": True, "levels": 0}
    container |= {"kind": "list", "length": 100, "added": 10, "added_bytes": 0, "entry": "Tensor", "keeps_graph": False}
    times = {
        "time_ns": before.detected_ns - source.offset_ns - S,
        "begin_ns": 0,
        "end_ns": before.detected_ns - source.offset_ns - S,
    }
    event = {"event": "growing_containers", **times, "first_step": 3, "last_step": 9, "containers": [container | facts]}
    event |= {"grown_bytes": 60 * MIB}
    check_event(event)
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    recording = Recording.open(folder)
    (finding,) = [one for one in detect_findings(recording, recording.end_ns) if one.name == "host_growth"]
    assert headline in finding.headline
    assert details in finding.details
    assert finding.fix == fix
    assert ("views that show 2.0 MiB of the 40.0 MiB" in finding.advice) is ("viewed_bytes" in facts)
    ends_itself = "limit" in facts and facts["limit"] < 1000
    assert finding.severity.value == ("info" if ends_itself else "warning")
    assert ("; full near step " in finding.headline) is not ends_itself
    evidence = {name: value for name, value in before.evidence.items() if name != "last_step" or not ends_itself}
    assert (finding.known_ns, finding.evidence) == (before.known_ns, evidence)


@pytest.mark.parametrize(
    ("added", "registered", "caller", "is_hook"),
    [
        (ADDS, "rank", "", True),
        (ADDS, "train", "", False),
        (ADDS | {"added_function": "Store.save"}, "Store.__init__", "Module._call_impl.<locals>.inner", True),
        (ADDS | {"added_function": "Store.save"}, "Store.__init__", "Module._wrapped_call_impl", False),
        (ADDS | {"added_function": "Store.forward"}, "Store.__init__", "Module._call_impl", False),
    ],
)
def test_a_container_that_a_hook_fills(added: dict[str, Any], registered: str, caller: str, is_hook: bool) -> None:
    container = {"name": "feats", "scope": "local", "owner": "rank", "file": "train.py", "levels": 0, "kind": "list"}
    container |= {"length": 100, "added": 10, "added_bytes": 30 * MIB, "entry": "Tensor", "keeps_graph": True, **added}
    frames = [
        {"file": "train.py", "line": 42, "function": added["added_function"], "own": True},
        {"file": "torch/nn/modules/module.py", "line": 1789, "function": caller, "own": False},
    ]
    change = {"name": "hooks", "before": "0 all modules", "after": "1 Linear", "file": "train.py", "line": 42}
    facts: list[tuple[type[Event], dict[str, Any]]] = [
        (GrowingContainers, {"containers": [container], "first_step": 3, "last_step": 9}),
        (TrainingChanged, {"changes": [change | {"function": registered}], "begin_ns": 0}),
        (Stacks, {"frames": frames, "stacks": [{"frames": [0, 1], "count": 3}], "where": "forward", "why": "share"}),
    ]
    written = [kind(values, 5, make_identity(0)) for kind, values in facts]
    process = SimpleNamespace(
        source=SimpleNamespace(offset_ns=0), events_of=lambda kind: [one for one in written if isinstance(one, kind)]
    )
    found = find_container(cast(Process, process), 5)
    assert found is not None
    assert Text(found.fix, found.values) == ("handle.remove()" if is_hook else "feats[-1] = feats[-1].detach()")
    assert ("hook" in found.advice) is is_hook
