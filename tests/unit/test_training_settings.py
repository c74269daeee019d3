"""What changed in the training is seen in the job's own objects, and its line in the job's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zerotop_probe.inside.changes import held_tensors, training_watch
from zerotop_probe.inside.changes.setting_lines import SettingLines
from zerotop_probe.inside.changes.training_settings import Change, list_changes, read_settings
from zerotop_probe.inside.changes.training_watch import TrainingWatch
from zerotop_probe.inside.device.allocator_snapshot import list_used_blocks, sum_pools
from zerotop_probe.inside.guard import CostMeter, is_wrapped, now, remove_hooks
from zerotop_probe.inside.oom_recorder import find_batch
from zerotop_probe.inside.stacks import code_positions
from zerotop_probe.inside.stacks.code_positions import Variable, choose_place, find_additions, find_calls_without, find_uses
from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.events import Event, TorchFlags

torch = pytest.importorskip("torch")

SCRIPT = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        self.recompute = True
        self.outputs = []
    def keep(self, output):
        self.outputs.append(output)
def freeze(model):
    for parameter in model.parameters():
        parameter.requires_grad = False
def unfreeze(model):
    for parameter in model.parameters():
        parameter.requires_grad_(True)
def relax(model, optimizer):
    model.recompute = False
    optimizer.param_groups[0]["foreach"] = False
def load(path):
    torch.load(path, map_location="cpu")
    return torch.load(path)
def begin():
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(8)
    torch.use_deterministic_algorithms(False)
def settle(name):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PathNames:
    """A script as the only own module."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    module = ModuleType("train")
    module.__file__ = str(path)
    exec(compile(SCRIPT, str(path), "exec"), vars(module))
    monkeypatch.setattr(code_positions, "sys", SimpleNamespace(modules={"train": module}))
    return PathNames(str(tmp_path), [])


@pytest.fixture(autouse=True)
def _remove_hooks() -> Iterator[None]:
    yield
    remove_hooks()
    assert not is_wrapped(torch.utils.checkpoint.check_backward_validity)


def make_model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))


def read(model: Any, *optimizers: Any, autocast: str = "") -> dict[str, Any]:
    return read_settings([model], optimizers, autocast)


def compare(model: Any, change: Any) -> dict[str, tuple[Any, Any]]:
    before = read(model)
    change(model)
    return {one.name: (one.before, one.after) for one in list_changes(before, read(model))}


def freeze(model: Any) -> None:
    model[0].requires_grad_(False)


def set_attribute(model: Any) -> None:
    model[2].gradient_checkpointing = True


def add_hook(model: Any) -> None:
    model[0].register_forward_hook(lambda *one: None)


def add_layer(model: Any) -> None:
    model.append(torch.nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: None, {}),
        (freeze, {"trained_parameters": (30, 10)}),
        (lambda model: model.double(), {"dtypes": ({"float32": 30}, {"float64": 30})}),
        (lambda model: model[1].eval(), {"module.training": (4, 3), "training_layers": ({"Dropout": 1}, {})}),
        (set_attribute, {"module.gradient_checkpointing": (0, 1)}),
        (lambda model: setattr(model[1], "_has_rebuilt_buckets", True), {}),
        (add_hook, {"hooks": ({"all modules": 0}, {"Linear": 1, "all modules": 0})}),
    ],
)
def test_a_setting_that_changes_is_the_only_one_named(change: Any, expected: dict[str, tuple[Any, Any]]) -> None:
    assert compare(make_model(), change) == expected


def test_more_layers_are_more_parameters() -> None:
    changes = compare(make_model(), add_layer)
    assert changes["parameters"] == (30, 39)
    assert changes["modules"] == (4, 5)


def test_flags_of_pytorch_are_settings() -> None:
    model, before = make_model(), torch.get_float32_matmul_precision()
    first = read(model)
    try:
        torch.set_float32_matmul_precision("high" if before != "high" else "highest")
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        names = {one.name for one in list_changes(first, read(model, autocast="bf16"))}
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    assert names == {"matmul_precision", "cudnn.benchmark", "autocast"}


def test_another_optimizer_and_its_options() -> None:
    model = make_model()
    first = torch.optim.AdamW(model.parameters())
    second = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    names = {one.name for one in list_changes(read(model, first), read(model, second))}
    assert {"optimizers", "optimizer_objects", "optimizer.foreach"} <= names


def test_lines_that_set_an_attribute_or_key(script: PathNames) -> None:
    assert {one.place.line for one in find_uses(("requires_grad", "requires_grad_()"), None, script)} == {11, 14}
    uses = find_uses(("requires_grad", "requires_grad_()"), None, script)
    assert choose_place(uses) is None, "two lines may have done it"
    frozen, thawed = choose_place(uses, False), choose_place(uses, True)
    assert (frozen and frozen.line, thawed and thawed.line) == (11, 14)
    assert [one.place.line for one in find_uses(("foreach",), None, script)] == [17]
    assert {one.place.function.rpartition(".")[2] for one in find_uses(("recompute",), None, script)} == {
        "__init__",
        "relax",
    }


def test_lines_that_add_to_a_list_or_load_without_a_place(script: PathNames) -> None:
    outputs = Variable("outputs", "attribute", "Net", "train.py")
    assert [place.line for place in find_additions(outputs, None, script)] == [8]
    assert find_additions(outputs._replace(scope="local", owner="freeze"), None, script) == [], "another one of that name"
    assert [place.line for place in find_calls_without("load", "map_location", None, script)] == [20]


def test_a_modules_own_begin_is_not_what_changed_it(script: PathNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathNames, "for_this_process", classmethod(lambda cls: script))
    _, place = SettingLines(CostMeter()).find_place(Change("module.recompute", 2, 0), 0, None)
    assert place is not None
    assert place.line == 16


@pytest.mark.parametrize(
    ("name", "before", "after", "line"),
    [
        ("matmul_precision", "high", "highest", 26),
        ("matmul_precision", "tf32", "ieee", 26),
        ("matmul_precision", "highest", "high", 22),
        ("matmul_precision", "high", "medium", 30),
        ("threads", 8, 1, 27),
        ("threads", 1, 8, 23),
        ("threads", 8, 2, None),
        ("deterministic_algorithms", False, True, 28),
        ("cudnn.benchmark", False, True, 29),
        ("cudnn.benchmark", True, False, None),
    ],
)
def test_the_line_that_gives_a_setting_its_value(
    script: PathNames, monkeypatch: pytest.MonkeyPatch, name: str, before: Any, after: Any, line: int | None
) -> None:
    monkeypatch.setattr(PathNames, "for_this_process", classmethod(lambda cls: script))
    _, place = SettingLines(CostMeter()).find_place(Change(name, before, after), 0, None)
    assert (place.line if place is not None else None) == line


class _Watched:
    """A watch with the events that it wrote and the steps after which it counted."""

    def __init__(self, model: Any, *, names_lines: bool = False) -> None:
        self.events: list[dict[str, Any]] = []
        self.counts: list[int] = []
        self.memory = (-1, -1)
        self.lines = SettingLines(CostMeter())
        self.watch = TrainingWatch(CostMeter(), self.lines)
        self.watch.begin_recording(self._keep_event, names_lines=names_lines)
        self.watch.list_parts = lambda: ([model], [])
        self.watch.count_tensors = lambda when, step: self.counts.append(step)
        self.watch.read_memory = lambda: self.memory
        self.flags: list[dict[str, Any]] = []
        self.time_ns, self.step = 10**12, 0

    def _keep_event(self, time_ns: int, event: type[Event], **facts: Any) -> None:
        (self.flags if event is TorchFlags else self.events).append(facts)

    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.time_ns += round(seconds * 1e9)
            self.step += 1
            self.watch.end_step(self.time_ns, self.step)


def test_flags_are_recorded_once() -> None:
    job = _Watched(torch.nn.Linear(2, 2))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        job.run(20, 0.1)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_flash_sdp(True)
    (flags,) = job.flags
    assert (flags["deterministic_algorithms"], flags["flash_attention"], flags["efficient_attention"]) == (True, False, True)
    assert flags["step"] == 1


def test_autocast_of_a_model_that_is_not_trained() -> None:
    """A step in which none is called, or asked, changes nothing; the first one that is says what was there before."""
    watched = _Watched(make_model())
    watched.run(20, 1.0)
    for is_on, seconds, told in ((True, 1.0, 0), (True, 2.0, 0), (False, 4.0, 1)):
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                watched.watch.note_other_autocast()
            watched.run(1, seconds)
        watched.run(3, seconds)
        assert [event["changes"] for event in watched.events] == [
            [{"name": "other_autocast", "before": "bf16", "after": ""}]
        ] * told
    assert watched.watch.autocast == ""


def test_a_first_part_outside_of_autocast_does_not_turn_it_off() -> None:
    watched = _Watched(make_model())
    for on in (True, True, False):
        for _ in range(20):
            watched.watch.note_forward(make_model())
            assert watched.watch.wants_autocast
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                watched.watch.note_forward(make_model())
            assert watched.watch.wants_autocast is not on
            watched.run(1, 1.0 if on else 3.0)
    (event,) = watched.events
    assert [(one["name"], one["before"], one["after"]) for one in event["changes"]] == [("autocast", "bf16", "")]


def test_autocast_was_on_when_a_forward_last_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of counted steps are not asked: a look in one of these shows what was read before."""
    watched = _Watched(make_model())
    monkeypatch.setattr(training_watch, "now", lambda: watched.time_ns)
    with torch.autocast("cpu", torch.bfloat16):
        watched.watch.note_forward(make_model())
    read_ns = watched.time_ns
    for seconds in (1.0, 2.0):
        watched.run(20, seconds)
    assert not watched.events
    watched.watch.note_forward(make_model())
    watched.run(20, 4.0)
    (event,) = watched.events
    assert event["begin_ns"] > read_ns
    assert event["changes"] == [{"name": "autocast", "before": "bf16", "after": "", "begin_ns": read_ns}]


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([500] * 20 + [1000] * 20, [("3 x 500 float32", "3 x 1000 float32")]),
        ([500] * 20 + [1000] + [500] * 20, []),  # one step is no change
        ([500, 1000] * 20, []),
        ([400 + 7 * (step * 37 % 50) for step in range(60)], []),
    ],
)
def test_inputs_that_became_larger_for_good(lengths: list[int], changes: list[tuple[str, str]]) -> None:
    watched = _Watched(make_model())
    for length in lengths:
        watched.watch.note_forward(make_model(), (torch.empty(16, 3, length),), {})
        watched.watch.note_forward(torch.nn.Linear(2, 2), (torch.empty(16, 32),), {})
        watched.run(1, 1.0)
    found = [change for event in watched.events for change in event["changes"]]
    assert [(one["before"], one["after"]) for one in found] == changes
    assert {one["name"] for one in found} <= {"inputs.Sequential"}


def test_inputs_had_the_old_size_until_the_last_forward_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and the ends of counted steps say nothing of it: the last look was before, and steps end later."""
    watched = _Watched(make_model())
    monkeypatch.setattr(training_watch, "now", lambda: watched.time_ns)
    shown_ns = []
    for length in (500, 500, 500, 1000, 1000):
        watched.watch.note_forward(make_model(), (torch.empty(16, 3, length),), {})
        shown_ns.append(watched.time_ns)
        watched.run(5, 1.0)
    (change,) = [change for event in watched.events for change in event["changes"]]
    assert change["begin_ns"] == shown_ns[2]


def test_sequences_of_several_lengths_in_one_tensor_have_no_shape() -> None:
    watched = _Watched(make_model())
    for length in (3, 3, 4, 4, 3, 3):
        rows = [torch.ones(length, 2), torch.ones(length + 1, 2)]
        watched.watch.note_forward(make_model(), (torch.nested.nested_tensor(rows, layout=torch.jagged),), {})
        watched.run(10, 1.0)
    assert watched.watch.is_due(0)
    assert not watched.events


def test_forwards_show_whether_gradients_are_reduced_after_them() -> None:
    """Models without the attribute, such as a part that is called by itself, say nothing."""
    watched, model = _Watched(make_model()), make_model()
    for reduces, seconds in ((False, 1.0), (False, 2.0), (True, 4.0)):
        model.require_backward_grad_sync = reduces
        for _ in range(20):
            watched.watch.note_forward(model)
            watched.watch.note_forward(make_model())
            watched.run(1, seconds)
    (event,) = watched.events
    (change,) = (one for one in event["changes"] if one["name"] == "no_sync")
    assert (change["before"], change["after"]) == ("on", "off")


def test_a_model_that_is_called_without_its_ddp_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the job that has no_sync() did not do that."""
    wrapper, model = torch.nn.Module(), make_model()
    wrapper.module, wrapper.require_backward_grad_sync = model, True
    watched = _Watched(model, names_lines=True)
    monkeypatch.setattr(watched.lines, "find_place", lambda *_: (1, OwnPlace("train.py", 12, "main")))

    def train(called: Any, steps: int, forwards: int = 1) -> None:
        for _ in range(steps):
            for forward in range(forwards):
                watched.watch.bypassed.note(called, is_first=not forward)
            watched.watch.note_forward(called)
            watched.run(1, 1.0)

    train(wrapper, 20)
    train(make_model(), 20)
    train(model, 5, forwards=20)  # as an evaluation that keeps gradients
    train(wrapper, 1)
    train(model, 10)
    assert not watched.events
    train(model, 5)
    (event,) = watched.events
    (change,) = event["changes"]
    assert (change["name"], change["before"], change["after"]) == ("no_sync", "off", "bypassed")
    assert "file" not in change
    assert change["begin_ns"] < change["changed_ns"]


def test_a_change_is_found_when_steps_become_longer() -> None:
    model = make_model()
    watched = _Watched(model)
    watched.run(20, 1.0)
    model[0].requires_grad_(False)
    watched.run(3, 2.0)
    (event,) = watched.events
    assert [change["name"] for change in event["changes"]] == ["trained_parameters"]
    assert event["last_step"] <= 20 < event["step"]


def test_a_line_that_runs_in_each_step_has_the_time_of_its_first_call_since_the_last_look() -> None:
    lines, changed = SettingLines(CostMeter()), Change("hooks", 0, 1)
    lines.is_on = True
    for look_ns in (0, 1000):
        lines.begin_look()
        for at_ns in (10, 20, 30):
            lines.note(look_ns + at_ns, ("hooks",))
            if at_ns == 10:
                lines.note(look_ns + 15, ("dtypes",))
        assert lines.find_place(changed, look_ns, None)[0] == look_ns + 10
        assert lines.has_noted
    lines.note(2000, ("hooks",))  # another line
    assert lines.find_place(changed, 1000, None)[0] == 2000


def test_what_a_model_adds_that_is_called_later_has_the_time_of_its_first_call() -> None:
    model, average = make_model(), make_model()
    watched = _Watched(model)
    watched.run(1, 1.0)
    watched.watch.list_parts, watched.watch.find_joined = lambda: ([model, average], []), lambda: 10**12 + 1_500_000_000
    watched.run(20, 1.0)
    model[0].requires_grad_(False)
    watched.run(3, 2.0)
    changes = [change for event in watched.events for change in event["changes"]]
    times = {(one["name"], one["after"]): one.get("changed_ns") for one in changes}
    assert times["parameters", "60"] == times["trained_parameters", "60"] == 10**12 + 1_500_000_000
    assert times["trained_parameters", "40"] is None
    assert len([one for one in times if one[0] == "trained_parameters"]) == 2


def test_a_change_is_found_soon_although_the_pace_wandered_before() -> None:
    model = make_model()
    watched = _Watched(model)
    for _ in range(6):  # each time it looks, and finds nothing
        watched.run(20, 0.1)
        watched.run(20, 0.2)
    model[0].requires_grad_(False)
    watched.run(100, 0.1)
    (event,) = watched.events
    assert event["step"] - event["last_step"] <= 90  # nine seconds


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_by_calls_is_a_setting(is_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint  # before it is followed, as scripts do

    watched, batch = _Watched(make_model()), torch.ones(2, 4, requires_grad=True)
    watched.lines.checkpoints.install_hooks()
    for is_on, steps in ((False, 5), (True, 9), (False, 9)):
        for step in range(steps):
            if is_on and step != 4:  # one step without is no change
                checkpoint(torch.sin, batch, use_reentrant=is_reentrant).sum().backward()
            watched.run(1, 0.5)
    changes = [(one["name"], one["before"], one["after"]) for event in watched.events for one in event["changes"]]
    assert changes == [("checkpointing", "False", "True"), ("checkpointing", "True", "False")]
    assert [event["step"] for event in watched.events] == [6, 17]


def test_a_job_that_checkpoints_from_the_first_step_on_has_changed_nothing() -> None:
    watched, batch = _Watched(make_model()), torch.ones(2, 4, requires_grad=True)
    for _ in range(12):  # followed from the first look on
        torch.utils.checkpoint.checkpoint(torch.sin, batch, use_reentrant=False).sum().backward()
        watched.run(1, 20.0)
    assert watched.lines.checkpoints.is_on
    assert watched.events == []


def test_a_part_without_a_configuration_is_no_other_attention() -> None:
    model = make_model()
    model.config = SimpleNamespace(_attn_implementation="sdpa")
    before = read_settings([model], [], "")
    assert before["attention"] == ["sdpa"]
    assert list_changes(before, read_settings([model, model[0]], [], "")) == []


def test_nothing_is_read_while_nothing_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(make_model())
    watched.run(3, 0.2)
    reads: list[int] = []

    def count_read(*arguments: Any) -> Any:
        reads.append(1)
        return read_settings(*arguments)

    target = "zerotop_probe.inside.changes.training_watch.read_settings"
    monkeypatch.setattr(target, count_read)
    watched.run(40, 0.2)
    assert not reads
    watched.run(200, 0.2)
    assert 1 <= len(reads) <= 4, "rarely, even so"


def test_tensors_are_counted_again_when_memory_after_a_step_steps_up() -> None:
    watched = _Watched(make_model())
    watched.memory = (1 << 30, 2 << 30)
    watched.run(20, 0.2)
    assert not watched.counts
    watched.memory = (3 << 29, 2 << 30)
    watched.run(2, 0.2)
    assert watched.counts == [21]
    watched.run(20, 0.2)
    assert watched.counts == [21]


def make_segment(
    address: int, sizes: list[tuple[int, str]], *, stream: int = 0, pool: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    used = sum(size for size, state in sizes if state == "active_allocated")
    return {
        "device": 0,
        "address": address,
        "total_size": sum(size for size, _ in sizes),
        "allocated_size": used,
        "stream": stream,
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": [{"size": size, "state": state} for size, state in sizes],
    }


def test_segments_by_who_can_use_them() -> None:
    segments = [
        make_segment(0, [(60, "active_allocated"), (40, "inactive")]),
        make_segment(1000, [(500, "inactive")], stream=7),
        make_segment(2000, [(10, "active_allocated"), (190, "inactive")], pool=(0, 3)),
    ]
    assert list_used_blocks(segments) == {0: 60, 2000: 10}
    assert sum_pools(segments) == [
        {"stream": 7, "private": False, "reserved": 500, "allocated": 0, "sparse": 0},
        {"stream": 0, "private": True, "reserved": 200, "allocated": 10, "sparse": 190},
        {"stream": 0, "private": False, "reserved": 100, "allocated": 60, "sparse": 0},
    ]


def test_the_list_that_keeps_views_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU: tensors in host memory stand for those on the device."""
    kept_views = []
    for _ in range(4):
        whole = torch.zeros(8, 64, 100)
        kept_views.append(whole[:, -1].detach())
    blocks = {one.untyped_storage().data_ptr(): 8 * 64 * 100 * 4 for one in kept_views}
    names = PathNames(str(Path(__file__).parent), [])
    monkeypatch.setattr(PathNames, "for_this_process", classmethod(lambda cls: names))
    found = held_tensors.describe_held(blocks, sys._getframe())
    named = {one["name"]: one for one in found}
    assert "kept_views" in named, found
    one = named["kept_views"]
    assert (one["kind"], one["count"], one["bytes"]) == ("list", 4, sum(blocks.values()))
    assert (one["shape"], one["view_of"]) == ([8, 100], [8, 64, 100])
    assert one["added_file"] == Path(__file__).name


@pytest.mark.parametrize(
    ("view", "base"),
    [
        (lambda whole: whole[:, -1], [8, 64, 100]),
        (lambda whole: whole[3], [8, 64, 100]),
        (lambda whole: whole[..., 7], [8, 64, 100]),
        (lambda whole: whole[:, :10], [8 * 64 * 100]),
        (lambda whole: whole[2, 3], [8 * 64, 100]),
    ],
)
def test_the_shape_that_a_view_is_of(view: Any, base: list[int]) -> None:
    assert held_tensors.find_base_shape(view(torch.zeros(8, 64, 100)).detach()) == base


def test_the_batch_of_a_failure_is_on_the_stack() -> None:
    assert find_batch(sys._getframe()) is None, "no tensor on a GPU"


def test_holders_are_searched_sooner_where_memory_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between searches doubles otherwise: 2.5 s, 5 s, 10 s."""
    seconds = 0.0
    monkeypatch.setattr(training_watch, "now", lambda: int(seconds * 1e9))
    monkeypatch.setattr(training_watch, "describe_held", lambda blocks, frame: [])
    watch = TrainingWatch(CostMeter(), SettingLines(CostMeter()))
    watch.begin_recording(lambda *_, **__: None, names_lines=True)
    searched = []
    for seconds, mebibytes in [(0.0, 100), (6.0, 200), (8.0, 800), (12.0, 380), (13.0, 800), (14.0, 1700), (19.0, 3500)]:
        if watch.find_held({1: mebibytes << 20}) is not None:
            searched.append(seconds)
    assert searched == [0.0, 6.0, 8.0, 14.0, 19.0]


def test_holders_are_searched_at_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_watch, "describe_held", lambda blocks, frame: [])
    watch = TrainingWatch(CostMeter(), SettingLines(CostMeter()))
    watch.begin_recording(lambda *_, **__: None, names_lines=True)
    assert watch.find_held({1: 1000 << 20}) == []
    searched = []
    watch.count_tensors = lambda when, step: searched.append(watch.find_held({1: 1500 << 20}))
    watch.count_tensors("again", 7)
    watch.count_at_failure(8)
    assert searched == [None, []]


class _Trained:
    """A loop of two linear layers and their optimizer, and what the looks at its parameters have found."""

    def __init__(self) -> None:
        self.models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))]
        self.optimizers = [torch.optim.SGD(self.models[0].parameters())]
        self.lines = SettingLines(CostMeter())
        self.lines.install_hooks()
        self.lines.is_on = True
        self.step = 0

    @property
    def model(self) -> Any:
        """The one that is called."""
        return self.models[-1]

    def train(self, *others: Any) -> dict[str, int]:
        """Train a step, with other modules after the model, and look; ten steps pass until the next one."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        output = self.model(torch.ones(1, 4)).sum()
        sum((other(torch.ones(1, 4)).sum() for other in others), output).backward()
        self.step += 10
        return self.lines.unoptimized.count([*self.models, *others], self.optimizers, now(), self.step)


def _replace_layer(loop: _Trained) -> None:
    loop.model[1] = torch.nn.Linear(4, 2)


def _replace_model(loop: _Trained) -> None:
    loop.models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))]


def _train_another(loop: _Trained) -> None:
    loop.models.append(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))


def _replace_optimizer(loop: _Trained) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    loop.lines.note(now(), ("optimizer_objects",))
    loop.optimizers = [torch.optim.SGD(other.parameters())]


def _unfreeze(loop: _Trained) -> None:
    loop.model[0].requires_grad_(True)


def _add_layer(loop: _Trained) -> None:
    loop.model.append(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_replace_layer, {"tensors": 2, "elements": 10, "left": 2, "dropped": 0, "unfrozen": 0}),
        (_replace_model, {"tensors": 4, "elements": 30, "left": 4, "dropped": 0, "unfrozen": 0}),
        (_train_another, {"tensors": 4, "elements": 30, "left": 4, "dropped": 0, "unfrozen": 0}),
        (_replace_optimizer, {"tensors": 4, "elements": 30, "left": 4, "dropped": 4, "unfrozen": 0}),
        (_unfreeze, {"tensors": 2, "elements": 20, "left": 0, "dropped": 0, "unfrozen": 2}),
        (_add_layer, {"tensors": 2, "elements": 6, "left": 0, "dropped": 0, "unfrozen": 0}),
    ],
)
def test_parameters_that_lost_their_optimizer_are_counted(change: Any, expected: dict[str, int]) -> None:
    """Not in the first look that shows it, and again no more once an optimizer holds all."""
    loop = _Trained()
    if change is _unfreeze:
        for parameter in loop.model[0].parameters():
            parameter.requires_grad_(False)
        loop.optimizers = [torch.optim.SGD(loop.model[1].parameters())]
    assert [loop.train(), loop.train()] == [{}, {}]
    change(loop)
    assert [loop.train() for _ in range(3)] == [{}, expected, expected]
    _, place = loop.lines.find_place(Change("unoptimized", {}, expected), 0, None)
    assert place is not None
    assert place.function == change.__name__
    loop.optimizers = [torch.optim.SGD(model.parameters()) for model in loop.models]
    assert loop.train() == {}


def _add_group(loop: _Trained) -> None:
    _add_layer(loop)
    loop.optimizers[0].add_param_group({"params": loop.model[2].parameters()})


def _freeze_all_but_the_last(loop: _Trained) -> None:
    loop.optimizers = [torch.optim.SGD(loop.model[1].parameters())]


def _replace_both(loop: _Trained) -> None:
    _replace_model(loop)
    loop.optimizers = [torch.optim.SGD(loop.model.parameters())]


def _add_adapter(loop: _Trained) -> None:
    loop.model.requires_grad_(False)
    _add_layer(loop)
    loop.optimizers.append(torch.optim.SGD(loop.model[2].parameters()))


def _add_second_pair(loop: _Trained) -> None:
    _train_another(loop)
    loop.optimizers.append(torch.optim.SGD(loop.model.parameters()))


@pytest.mark.parametrize("change", [_add_group, _freeze_all_but_the_last, _replace_both, _add_adapter, _add_second_pair])
def test_changes_that_leave_no_parameter_without_an_optimizer(change: Any) -> None:
    loop = _Trained()
    assert loop.train() == {}
    change(loop)
    assert [loop.train() for _ in range(3)] == [{}, {}, {}]


def test_a_model_that_joins_without_an_optimizer_is_meant_to_be_so() -> None:
    loop, critic = _Trained(), torch.nn.Linear(4, 2)
    assert loop.train() == {}
    assert [loop.train(critic) for _ in range(3)] == [{}, {}, {}]


def test_a_design_that_leaves_a_part_to_no_optimizer_is_never_told() -> None:
    loop = _Trained()
    loop.optimizers = [torch.optim.SGD(loop.model[1].parameters())]
    assert loop.train() == {}
    _replace_layer(loop)
    assert [loop.train() for _ in range(3)] == [{}, {}, {}]


def test_a_layer_that_is_added_to_the_optimizer_soon_is_not_told() -> None:
    loop = _Trained()
    assert loop.train() == {}
    _add_layer(loop)
    assert loop.train() == {}
    loop.optimizers[0].add_param_group({"params": loop.model[2].parameters()})
    assert [loop.train() for _ in range(2)] == [{}, {}]
