"""Changes in the training itself, as a rank's probe has found them: another dtype, trained layers, an optimizer, a hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from zerotop.analysis.code_line import CodeLine, read_line
from zerotop.analysis.formatting import join_words
from zerotop_probe.recording.event_values import BYPASSED, INPUTS, NO_SYNC, OBJECTS, SUBNORMAL, UNOPTIMIZED
from zerotop_probe.recording.events import ChangedSetting, TrainingChanged

# Changes that one sentence names, the most telling first.
_MOST_NAMED = 2
# Gradient checkpointing as a setting of modules, and as calls of PyTorch's functions, which follow from it.
_BY_MODULES, _BY_CALLS = "module.gradient_checkpointing", "checkpointing"
_ORDER = (
    INPUTS,
    "dtypes",
    "autocast",
    "other_autocast",
    "devices",
    "trained_parameters",
    UNOPTIMIZED,
    NO_SYNC,
    _BY_MODULES,
    _BY_CALLS,
    "parameters",
    "compiled",
    "attention",
    "module.training",
    "module.",
    "optimizers",
    "optimizer.",
    "hooks",
    "parameter_hooks",
)
# Follow from others, have findings or causes of their own, or are what libraries note about their modules.
_LEFT_OUT, _LEFT_OUT_PREFIX = ("modules", "anomaly_mode", "training_layers", SUBNORMAL), "module._"
_NUMBERS = ("trained_parameters", "parameters")
_OPTIMIZERS, _OF_PARAMETERS = (OBJECTS, "optimizers"), ("trained_parameters", "parameters", "dtypes", "devices")
_WIDTHS = {"float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class TrainingChange(NamedTuple):
    """One setting that changed between two looks, in unix nanoseconds."""

    name: str
    before: str
    after: str
    begin_ns: int  # it was as before
    end_ns: int  # it was as after
    known_ns: int
    line: CodeLine | None

    @property
    def text(self) -> str:
        """The change and its line, as the end of a sentence."""
        place = f" ({self.line.text})" if self.line is not None else ""
        return f"{_describe(self.name, self.before, self.after)}{place}"

    @property
    def effect(self) -> int:
        """1 if it makes steps longer and larger, -1 if shorter, 0 if that is not known."""
        if self.name == "dtypes":
            return _compare(_measure_width(self.before), _measure_width(self.after))
        if self.name.startswith(INPUTS):
            return _compare(1.0, self.input_times)
        if self.name in ("trained_parameters", "parameters", "hooks", "parameter_hooks"):
            return _compare(_sum_counts(self.before), _sum_counts(self.after))
        return 0

    @property
    def input_times(self) -> float:
        """How many times as many values a row of a model's inputs has; 1 if that is another setting, or unknown."""
        before, after = (_count_values(text) if self.name.startswith(INPUTS) else 0 for text in (self.before, self.after))
        return after / before if before and after else 1.0

    @property
    def checkpoints(self) -> bool:
        """Whether gradient checkpointing was switched on."""
        return self.name in (_BY_MODULES, _BY_CALLS) and self.after not in ("0", "False")

    @property
    def effect_on_time(self) -> int:
        """The same of their time alone: evaluation mode leaves out dropout and checkpointing, no_sync() reductions."""
        if self.name == UNOPTIMIZED:  # shorter updates
            return _compare(_sum_counts(self.after), _sum_counts(self.before))
        if self.name == NO_SYNC:
            return _compare(self.after != "off", self.before != "off")
        if self.name == "module.training":
            return _compare(_sum_counts(self.before), _sum_counts(self.after))
        return self.effect


def list_changes(found: Iterable[TrainingChanged], offset_ns: int) -> Iterator[TrainingChange]:
    """Iterate over the changes of a process's ``training_changed`` events; its clock is ``offset_ns`` behind unix time."""
    for event in found:
        # Parameters that are changed without a method of their module are given to a new optimizer at once.
        made_ns = next((one.changed_ns for one in event.changes if one.name in _OPTIMIZERS), None)
        called = next((one for one in event.changes if one.name == _BY_CALLS), None)
        # Only their number differs: the line that has changed it is known with their dtypes or devices.
        counted = next((one for one in event.changes if one.file and _is_count_alone(one)), None)
        # New modules are in training mode.
        added = {(one.before, one.after) for one in event.changes if one.name == "modules"}
        for change in event.changes:
            name, before, after, exact_ns = change.name, change.before, change.after, change.changed_ns
            is_left_out = name in _LEFT_OUT or name.startswith(_LEFT_OUT_PREFIX)
            # More parameters of the same dtypes, on the same devices, are a change of their number.
            is_left_out |= _is_count_alone(change) or (name == "module.training" and (before, after) in added)
            if is_left_out or not all(text.isprintable() for text in (name, before, after)):
                continue
            line = read_line(change)
            if counted is not None and line is None and name in _NUMBERS:
                line, exact_ns = read_line(counted), counted.changed_ns
            exact_ns = made_ns if exact_ns is None and name in _OF_PARAMETERS else exact_ns
            if exact_ns is None and called is not None and _switches_calls(change, called):
                exact_ns = called.changed_ns
            begin_ns, end_ns = (change.begin_ns or event.begin_ns) + offset_ns, event.unix_ns
            if exact_ns is not None:
                begin_ns = end_ns = exact_ns + offset_ns
            yield TrainingChange(name, before, after, begin_ns, end_ns, event.unix_ns, line)


def _switches_calls(change: ChangedSetting, called: ChangedSetting) -> bool:
    """Whether a module's setting is what switched checkpointing by calls on or off."""
    is_on = _sum_counts(change.after) > _sum_counts(change.before)
    return _is_by_modules(change.name) and is_on == (called.after == "True")


def _is_by_modules(name: str) -> bool:
    return name.startswith("module.") and "checkpoint" in name


def _is_count_alone(change: ChangedSetting) -> bool:
    """Whether there are more or fewer parameters of the same dtypes, or on the same devices."""
    return change.name in ("dtypes", "devices") and _name_kinds(change.before) == _name_kinds(change.after)


def choose_changes(
    changes: Iterable[TrainingChange], earliest_ns: int, latest_ns: int, known_ns: int
) -> list[TrainingChange]:
    """Return what changed between two times, as known at a third one, the most telling first."""
    found = [
        change
        for change in changes
        if change.known_ns <= known_ns and change.begin_ns <= latest_ns and change.end_ns >= earliest_ns
    ]
    # A new optimizer with options of its own is one change.
    if any(change.name == "optimizers" or change.name.startswith("optimizer.") for change in found):
        found = [change for change in found if change.name != OBJECTS]
    # Another class has other options.
    if any(change.name == "optimizers" for change in found):
        found = [one for one in found if not one.name.startswith("optimizer.") or (one.before and one.after)]
    trained = {(change.before, change.after) for change in found if change.name == "trained_parameters"}
    found = [change for change in found if change.name != "parameters" or (change.before, change.after) not in trained]
    if any(_is_by_modules(change.name) for change in found):
        found = [change for change in found if change.name != _BY_CALLS]
    return sorted(found, key=_rank_change)


def describe_changes(changes: list[TrainingChange]) -> str:
    """Return the most telling changes as the end of a sentence. Those of one setting at one line are one."""
    same: dict[tuple[str, CodeLine | None], list[TrainingChange]] = {}
    for change in changes:
        same.setdefault((change.name, change.line), []).append(change)
    texts = [describe_repeated(some) if len(some) > 1 else some[0].text for some in same.values()]
    return join_words(texts[:_MOST_NAMED])


def describe_repeated(changes: list[TrainingChange]) -> str:
    """Return changes of the same setting at the same line, each seen by another look, as the end of a sentence."""
    first, last = changes[0], changes[-1]
    place = f" ({first.line.text})" if first.line is not None else ""
    return f"{_describe(first.name, first.before, last.after)}, in {len(changes)} or more steps{place}"


def _rank_change(change: TrainingChange) -> int:
    return next((number for number, name in enumerate(_ORDER) if change.name.startswith(name)), len(_ORDER))


def _describe(name: str, before: str, after: str) -> str:
    if name in ("dtypes", "devices"):
        where = "" if name == "dtypes" else "on "
        return f"parameters are {where}{_name_kinds(after)} instead of {_name_kinds(before)}"
    if name == "trained_parameters":
        return f"{_sum_counts(after):,} parameters are trained instead of {_sum_counts(before):,}"
    if name == "parameters":
        return f"the model has {_sum_counts(after):,} parameters instead of {_sum_counts(before):,}"
    if name in ("hooks", "parameter_hooks"):
        return _describe_hooks(name, before, after)
    if name == UNOPTIMIZED:
        count = parse_counts(after).get("elements", 0)
        return f"no optimizer updates {count:,} trained parameters" if count else "optimizers update all parameters again"
    if name == NO_SYNC and after == BYPASSED:
        return "the model is called without its DistributedDataParallel"
    if name == NO_SYNC:
        return f"the first micro-step of a step is {'within' if after == 'on' else 'outside of'} DDP's no_sync()"
    if name == _BY_CALLS:
        return f"gradient checkpointing was switched {'on' if after == 'True' else 'off'}"
    if name == "compiled":
        return "the model was compiled" if after > before else "the model is no longer compiled"
    return _describe_setting(name, before, after)


def _describe_inputs(model: str, before: str, after: str) -> str:
    """Name the sizes of a row, and how many times as many values that are; or the dtypes, if these alone differ."""
    (old, old_type), (new, new_type) = (text.rpartition(" ")[::2] for text in (before, after))
    if old == new:
        return f"inputs of {model} are {new_type} instead of {old_type}"
    values = _count_values(before), _count_values(after)
    times = f", {values[1] / values[0]:.1f} times as many values" if 0 < values[0] < values[1] else ""
    return f"each row of {model}'s inputs is {new} instead of {old}{times}"


def _count_values(text: str) -> int:
    """Return the values of a row: of ``1024 x 3 float32``."""
    sizes = text.rpartition(" ")[0].split(" x ")
    return prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else 0


def _describe_setting(name: str, before: str, after: str) -> str:
    if name == OBJECTS:
        return "the optimizer was made anew"
    if name == "optimizers":
        return f"the optimizer is {after or 'none'} instead of {before or 'none'}"
    if name == "other_autocast":
        return f"autocast is {after or 'off'} instead of {before or 'off'} in a model that is not trained"
    kind, _, attribute = name.partition(".")
    if name.startswith(INPUTS):
        return _describe_inputs(attribute, before, after)
    if kind == "optimizer":
        return f"the optimizer's {attribute} is {after or 'gone'} instead of {before or 'not set'}"
    if kind == "module":
        return _describe_attribute(attribute, _sum_counts(before), _sum_counts(after))
    return f"{name.replace('_', ' ')} is {after or 'off'} instead of {before or 'off'}"


def _describe_attribute(attribute: str, before: int, after: int) -> str:
    is_on = after > before
    if attribute == "gradient_checkpointing":
        return f"gradient checkpointing was switched {'on' if is_on else 'off'}"
    modules = f"{abs(after - before):,} module{'s' if abs(after - before) != 1 else ''}"
    if attribute == "training":
        return f"{modules} went into {'training' if is_on else 'evaluation'} mode"
    return f"{attribute} became {is_on} in {modules}"


def _describe_hooks(name: str, before: str, after: str) -> str:
    counts = {kind: count for kind, count in parse_counts(after).items() if count > parse_counts(before).get(kind, 0)}
    added = _sum_counts(after) - _sum_counts(before)
    what = f"{abs(added)} hook{'s' if abs(added) != 1 else ''}"
    where = f" of {join_words(list(counts)[:3])}" if counts and name == "hooks" else " of parameters" * (name != "hooks")
    return f"{what}{where} {'were' if abs(added) != 1 else 'was'} {'added' if added > 0 else 'removed'}"


def parse_counts(text: str) -> dict[str, int]:
    """Parse ``12 float32, 3 bfloat16``, or a number alone."""
    counts: dict[str, int] = {}
    for part in filter(None, text.split(", ")):
        number, _, kind = part.partition(" ")
        if number.lstrip("-").isdigit():
            counts[kind] = int(number)
    return counts


def _sum_counts(text: str) -> int:
    return sum(parse_counts(text).values())


def _name_kinds(text: str) -> str:
    counts = parse_counts(text)
    return join_words(sorted(counts, key=lambda kind: -counts[kind])) or "unknown"


def _measure_width(text: str) -> float:
    """Return the bytes of all parameters."""
    return float(sum(_WIDTHS.get(kind, 4) * count for kind, count in parse_counts(text).items()))


def _compare(before: float, after: float) -> int:
    return (after > before) - (after < before)
