"""The variable or attribute that makes a rank's host memory grow, as its probe has found it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.analysis.steps.training_changes import list_changes
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING

_DETACH = "Keep only detached tensors in {name}, without the graph that computed them[, by this line after {after}]."
_CLONE = (
    "Keep copies in {name}, by clone(): its new tensors are views that show {viewed_bytes:bytes} of the {kept_bytes:bytes}"
    " that they keep."
)
_KEEP_NUMBERS = "Keep numbers in {name}, not tensors[, by this line after {after}]."
_KEEP_LESS = "Keep less in {name}, or clear it now and then."
_KEEP_LAST = (
    "Keep less in {name}; or only its last {kept_entries:,.0f} entries, if nothing needs older ones[: after {after}]."
)
# Lines that remove all but the last entries of a variable, by its type.
_REMOVALS = {"list": "del {0}[:-{1}]", "deque": "while len({0}) > {1}: {0}.popleft()"}
_REMOVALS |= dict.fromkeys(("dict", "OrderedDict", "defaultdict"), "while len({0}) > {1}: {0}.pop(next(iter({0})))")
_UNHOOK = (
    "Keep the handle of the hook that {added} belongs to, and call its remove() after use: while it is registered, it adds"
    " to {name} in each pass."
)
_DETAILS = (
    " From step {from_step} to {to_step} {container} grew from {before:,.0f} to {length:,.0f} entries{graph}"
    "[, of at most {limit:,.0f}][: {added} adds to it{hook}][: {defined} defines it]."
)

# A container that holds this share of what host memory grew by explains it: small objects take more than their own sizes.
_NOTABLE = 0.3
# What views keep is new memory only if it is at most so many times what the rank's memory has grown by.
_NEW_TIMES = 2.0
# A tensor in host memory of at most so many bytes has one element.
_NUMBER_BYTES = 4
_MODULE_CALL = "Module._call_impl"  # it calls forward() and the hooks of a module
# How long a finding waits for the probe's look (ns), which takes some steps and must fit into the budget: where others use
# the cores, most steps are only counted, and memory is read between them.
_PATIENCE_NS = 30_000_000_000


class GrowingContainer(NamedTuple):
    """A container that grows with host memory."""

    name: str  # of the variable or attribute
    advice: str
    explains_growth: bool  # its new entries hold most of what host memory grew by, or graphs
    fix: str
    rest_bytes: float | None  # what its remaining entries will hold, if their number has a limit
    is_wasteful: bool  # its tensors are views that keep more memory than they show
    values: dict[str, Any]  # of the templates

    def name_in(self, kind: FindingKind) -> FindingKind:
        """Return a kind of finding with the container in its sentence, and with advice about it. Needs ``values``."""
        return kind.with_changes(details=kind.details + _DETAILS, advice=self.advice, fix=self.fix)


class FoundContainer(NamedTuple):
    """A container, or None, and when that is known (unix nanoseconds)."""

    container: GrowingContainer | None
    known_ns: int

    def known_at(self, time_ns: int) -> FoundContainer:
        """Return it with what is known of its growth at a later time."""
        return self._replace(known_ns=max(time_ns, self.known_ns + 1))


def find_container(process: Process, known_ns: int) -> GrowingContainer | None:
    """Return the container of a rank that its probe had found at a time, the last one."""
    found = [one for one in process.events_of(events.GrowingContainers) if one.containers and one.unix_ns <= known_ns]
    return _read_container(process, found[-1]) if found else None


def await_container(process: Process, begin_ns: int, known_ns: int) -> FoundContainer | None:
    """Return the container that has grown most since ``begin_ns``; None while the probe may still write its event."""
    deadline_ns = known_ns
    if process.at.recording.info.get(STACKS_SETTING) is True:
        deadline_ns = find_deadline(process, known_ns, _PATIENCE_NS)
    last = None
    for event in process.events_of(events.GrowingContainers):
        end_ns = event.end_ns + process.source.offset_ns
        is_early = event.unix_ns <= known_ns
        if end_ns > begin_ns and event.containers and (is_early or (last is None and event.unix_ns <= deadline_ns)):
            last = event
    if last is not None:
        return FoundContainer(_read_container(process, last), max(known_ns, last.unix_ns))
    return FoundContainer(None, deadline_ns) if process.at.cursor_ns >= deadline_ns else None


def _read_container(process: Process, found: events.GrowingContainers) -> GrowingContainer | None:
    largest = found.containers[0]
    line = f"{largest.added_file}:{largest.added_line}" if largest.added_file and largest.added_line else None
    if not all(text.isprintable() for text in (largest.name, largest.owner, largest.file, largest.kind, line or "")):
        return None
    name, keeps_graph, is_hook = largest.name, bool(largest.keeps_graph), _is_added_by_hook(process, largest, found.unix_ns)
    limit, is_cache, viewed = largest.limit, largest.kind == "lru_cache", largest.viewed_bytes
    if viewed and (largest.added_bytes or 0) > _NEW_TIMES * (found.grown_bytes or 0):
        viewed = None
    variable, last = _name_variable(largest), 10 ** (len(f"{largest.length - largest.added or largest.length}") - 1)
    holds_tensors = bool(variable) and largest.kind == "list" and largest.entry == "Tensor"
    values = {
        "from_step": found.first_step,
        "to_step": found.last_step,
        "container": _describe_container(largest),
        "before": largest.length - largest.added,
        "length": largest.length,
        "graph": ", tensors with the graph that computed them" if keeps_graph else "",
        "name": name,
        "added": line if not is_cache else None,
        "hook": ", in a hook" if is_hook else "",
        "defined": line if is_cache else None,
        "limit": limit,
        "kept_entries": last,
        "viewed_bytes": viewed,
        "kept_bytes": largest.added_bytes,
    }
    each = (largest.added_bytes or 0) / max(1, largest.added)
    holds_growth = (largest.added_bytes or 0) >= _NOTABLE * (found.grown_bytes or 0)
    advice, fix = _KEEP_LESS, ""  # code has brackets, as templates have
    if viewed and not keeps_graph:
        advice, fix = _CLONE, line or ""
    elif is_cache and limit is not None:
        advice = "Keep fewer results in the cache of {name}: a maxsize below {limit:.0f}."
        fix = f"@functools.lru_cache(maxsize={limit // 2})"
    elif is_hook:
        advice, fix = _UNHOOK, "handle.remove()"
    elif keeps_graph:
        advice, method = (_KEEP_NUMBERS, "item") if _holds_numbers(largest) else (_DETACH, "detach")
        advice = f"{advice} {_KEEP_LESS}" if method == "detach" and found.grown_bytes and holds_growth else advice
        fix = f"{variable}[-1] = {variable}[-1].{method}()" if holds_tensors else line or ""
    elif variable and largest.kind in _REMOVALS and limit is None:
        advice, fix = _KEEP_LAST, _REMOVALS[largest.kind].format(variable, last)
    rest = max(0, limit - largest.length) * each if limit is not None else None
    values |= {"keeping": fix or None, "after": line if fix != line else None}
    return GrowingContainer(name, advice, keeps_graph or holds_growth, "[{keeping}]", rest, bool(viewed), values)


def _name_variable(container: events.GrownContainer) -> str:
    """Return the container as the line that adds to it can write it; "" where that is unknown, or it has no name itself."""
    if container.levels or container.scope != "attribute":
        return "" if container.levels else container.name
    return f"self.{container.name}" if (container.added_function or ".").startswith((f"{container.owner}.", ".")) else ""


def _holds_numbers(container: events.GrownContainer) -> bool:
    """Whether its new entries are tensors of one element."""
    size = container.added_bytes
    return container.entry == "Tensor" and size is not None and size <= _NUMBER_BYTES * container.added


def _is_added_by_hook(process: Process, container: events.GrownContainer, known_ns: int) -> bool:
    """Whether the line that adds to a container is in a hook of a module: one was registered there, or stacks show it."""
    file, line, function = container.added_file, container.added_line, container.added_function
    if not file or not line or not function:
        return False
    for change in list_changes(process.events_of(events.TrainingChanged), process.source.offset_ns):
        at = change.line
        if change.name == "hooks" and change.effect > 0 and change.known_ns <= known_ns and at is not None:
            is_inside = function.startswith(f"{at.function}.<locals>.") or (at.function, at.line) == (function, line)
            if at.file == file and is_inside:
                return True
    if function.rpartition(".")[2] == "forward":
        return False  # modules call it too
    return any(
        (inner.file, inner.function) == (file, function) and outer.function.startswith(_MODULE_CALL)
        for event in process.events_of(events.Stacks)
        if event.unix_ns <= known_ns
        for stack in event.stacks
        for inner, outer in pairwise(event.frames[one] for one in stack.frames if 0 <= one < len(event.frames))
    )


def _describe_container(container: events.GrownContainer) -> str:
    name, file = container.name, container.file
    place = f" ({file})" if file else ""
    if container.scope == "local":
        where = f"{name} in {container.owner}(){place}"
    elif container.scope == "attribute":
        where = f"{container.owner}.{name}{place}"
    else:
        where = f"{name} of {file or container.owner}"
    return f"a {container.kind} within {where}" if container.levels else f"the {container.kind} {where}"
