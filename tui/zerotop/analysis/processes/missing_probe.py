"""Processes of a job in which the probe was not loaded, so that their training is not recorded, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerotop.analysis.formatting import format_count, join_words
from zerotop.recording.moments.at import At
from zerotop_probe.recording import events

# By the reason, for one process and for several; see the event.
_REASONS = {
    "pythonpath": "{its} PYTHONPATH does not have zerotop's entry{changed}",
    "unset": "{its} environment has no PYTHONPATH, and so not zerotop's entry{changed}",
    "environment": "{its} environment does not have zerotop's PYTHONPATH and variables{changed}",
    "option": "{it_runs} python {by}, which {ignores}",
    "session": "{its} launcher did not pass on PYTHONZEROTOP_SESSION",
    "hidden": "{it_sees} other files, as in a container: zerotop's entry of PYTHONPATH is not among them",
    "shadowed": "{by} comes before zerotop's entry in {its} PYTHONPATH",
    "unreadable": "{it_belongs} to another user, and {its} PYTHONPATH cannot be read",
    "user": "{it_runs} as another user, who cannot write to the recording",
}
_SHORT_REASONS = {
    "pythonpath": "PYTHONPATH lacks its entry",
    "unset": "PYTHONPATH is not set",
    "environment": "all variables were dropped",
    "option": "python {by}",
    "session": "a variable was dropped",
    "hidden": "in a container",
    "shadowed": "another sitecustomize.py",
    "unreadable": "another user's",
    "user": "another user's",
}
_REMEDIES = {
    "pythonpath": 'Keep what PYTHONPATH has, as in PYTHONPATH="src:$PYTHONPATH".',
    "unset": "Leave PYTHONPATH as zerotop run sets it.",
    "environment": "Pass on PYTHONPATH and PYTHONZEROTOP_SESSION.",
    "option": "Leave out {by}.",
    "session": "Pass on PYTHONZEROTOP_SESSION.",
    "hidden": "Run zerotop inside.",
    "shadowed": "Move that file behind zerotop's entry.",
    "unreadable": "Run zerotop as that user.",
    "user": "Run zerotop as that user.",
}
_ONE = {"its": "its", "it_runs": "it runs", "it_sees": "it sees", "it_belongs": "it belongs"}
_MANY = {"its": "their", "it_runs": "they run", "it_sees": "they see", "it_belongs": "they belong"}
_CHANGES = {"pythonpath": "sets", "unset": "removes", "environment": "replaces"}
_CHANGERS = {"script": "the script", "command": "the command"}
_MOST_PROGRAMS = 3


@dataclass(frozen=True)
class MissingProbe:
    """Processes without the probe for the same reason."""

    reason: str
    by: str
    are_ranks: bool
    events: tuple[events.ProbeMissing, ...]  # one for each process

    @property
    def headline(self) -> str:
        """A sentence of at most 80 characters, without a period."""
        short = _SHORT_REASONS.get(self.reason, "").format(by=self.by)
        return f"The probe was not loaded in {self._who}: {short}"

    @property
    def why(self) -> str:
        """The reason as a clause."""
        words = _ONE if len(self.events) == 1 else _MANY
        changer = _CHANGERS.get(self.by, self.by)
        changed = f" ({changer} {_CHANGES[self.reason]} it)" if changer and self.reason in _CHANGES else ""
        ignores = "does not load site modules" if self.by == "-S" else "ignores PYTHONPATH"
        template = _REASONS.get(self.reason, "the reason is unknown")
        return template.format(**words, by=self.by, changed=changed, ignores=ignores)

    @property
    def sentence(self) -> str:
        """The processes and the reason in one sentence, without a period."""
        return f"The probe was not loaded in {self._who}{self._programs}: {self.why}"

    @property
    def remedy(self) -> str:
        """A sentence about the next run."""
        return _REMEDIES.get(self.reason, "").format(by=self.by)

    @property
    def _who(self) -> str:
        if self.are_ranks:
            return format_count(len(self.events), "rank")
        return "a process with PyTorch" if len(self.events) == 1 else f"{len(self.events)} processes with PyTorch"

    @property
    def _programs(self) -> str:
        """The names of processes that may have trained or not."""
        names = list(dict.fromkeys(event.program or "?" for event in self.events))
        return "" if self.are_ranks else f" ({join_words(names[:_MOST_PROGRAMS])})"


def find_missing_probes(at: At) -> list[MissingProbe]:
    """Return the processes without the probe at a moment in unix time, by reason; ranks if there are any.

    While a rank reports, processes that no launcher numbered may be anything: they do not count.
    """
    reported = {event.process_key for event in at.events_of(events.Hello)}
    found = at.events_of(events.ProbeMissing)
    latest = {(event.writer.host, event.pid, event.start): event for event in found}
    missing = [event for event in latest.values() if event.process_key not in reported]
    ranks = [event for event in missing if event.is_rank]
    if reported:
        ranks = [event for event in ranks if event.rank is not None]
        return _group_events(ranks, are_ranks=True)
    is_over = bool(at.events_of(events.JobEnded))
    if ranks or not is_over:
        return _group_events(ranks, are_ranks=True)
    return _group_events(missing, are_ranks=False)


def _group_events(found: Iterable[events.ProbeMissing], *, are_ranks: bool) -> list[MissingProbe]:
    groups: dict[tuple[str, str], list[events.ProbeMissing]] = {}
    for event in found:
        groups.setdefault((event.reason or "", event.by or ""), []).append(event)
    return [MissingProbe(*key, are_ranks, tuple(members)) for key, members in groups.items()]


def describe_missing_probes(at: At) -> list[str]:
    """Return a sentence for each reason for which the probe was not loaded in some processes."""
    return [f"{missing.sentence}." for missing in find_missing_probes(at)]
