"""All recordings in one place, each in a line. What was found out about one is kept until it changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotop.analysis.reports.recording_summary import Overview, overview
from zerotop.session import catalog
from zerotop.session.atomic_write import write_whole
from zerotop.session.headers import DAMAGED
from zerotop.session.quick_read import Stamp, glimpse, stamp
from zerotop.session.reader import SessionError

CACHE_VERSION = 2
"""Raised when an overview says something else than before."""

# Silence after which a recording whose end nobody saw counts as ended, as in the reader.
_LIVE_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording in the list; ``about`` is None until it was looked into."""

    path: Path
    packed: bool
    stamp: Stamp
    live: bool
    about: Overview | None

    @property
    def name(self) -> str:
        """What its file is called, which is what other commands take."""
        return self.path.name

    @property
    def begin_ns(self) -> int:
        """When it was made; until that is known, when it was last changed."""
        return self.about.begin_ns if self.about is not None and self.about.begin_ns else self.stamp.changed_ns

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.about.seconds if self.about is not None else float("nan")


class Overviews:
    """The recordings of a folder, newest first. Reads nothing in :meth:`look`, and one of them in :meth:`read_next`."""

    def __init__(self, root: Path, cache: Path | None, job_runs: Callable[[Path], bool]) -> None:
        """``cache`` is where to keep what was found out; ``job_runs`` says of a session whether its job does, here."""
        self._root = root
        self._cache = cache
        self._job_runs = job_runs
        self._known = _load(cache) if cache is not None else {}
        self._saved = dict(self._known)
        self._silent: set[tuple[Path, Stamp]] = set()  # recordings whose job was found to be over, unseen
        self.recordings: tuple[Recording, ...] = ()

    def look(self) -> tuple[Recording, ...]:
        """Lists what there is now."""
        found = [recording for path in catalog.listing(self._root) if (recording := self._recording(path)) is not None]
        self.recordings = tuple(sorted(found, key=lambda recording: recording.begin_ns, reverse=True))
        return self.recordings

    def _recording(self, path: Path) -> Recording | None:
        try:
            now = stamp(path)
        except OSError:  # it was deleted under us
            return None
        key = str(path)
        packed = not path.is_dir()
        before, about = self._known.get(key, (None, None))
        # One that grows is shown as it was last seen until it is looked into again.
        live = not packed and self._is_live(path, now, about if before == now else None)
        return Recording(path, packed, now, live, about if before == now or live else None)

    def _is_live(self, path: Path, now: Stamp, about: Overview | None) -> bool:
        if about is not None and (about.over or about.problem):
            return False
        written_ns = now.changed_ns if about is None else about.end_ns
        if time.time_ns() - written_ns < _LIVE_NS:
            return True
        # A job that has ended does not begin again; whoever goes on recording writes.
        if (path, now) in self._silent:
            return False
        runs = self._job_runs(path)
        if not runs:
            self._silent.add((path, now))
        return runs

    def read_next(self) -> Recording | None:
        """Looks into the newest one that has changed since; None when there is none."""
        for recording in self.recordings:
            if self._known.get(str(recording.path), (None,))[0] != recording.stamp:
                return self._read(recording)
        return None

    def _read(self, recording: Recording) -> Recording:
        about = look_into(recording.path)
        self._known[str(recording.path)] = (recording.stamp, about)
        live = recording.live and self._is_live(recording.path, recording.stamp, about)
        fresh = replace(recording, about=about, live=live)
        others = [other for other in self.recordings if other.path != recording.path]
        self.recordings = tuple(sorted([*others, fresh], key=lambda each: each.begin_ns, reverse=True))
        return fresh

    def read_all(self) -> tuple[Recording, ...]:
        """Lists what there is, and looks into all that has changed."""
        self.look()
        while self.read_next() is not None:
            pass
        self.save()
        return self.recordings

    def save(self) -> None:
        """Keeps what was found out. Where that cannot be written it is found out again."""
        here = {str(recording.path) for recording in self.recordings}
        known = {key: value for key, value in self._known.items() if key in here}
        if self._cache is None or known == self._saved:
            return
        self._saved = known
        content = {
            "version": CACHE_VERSION,
            "known": {key: {"stamp": list(of), "about": about.as_json()} for key, (of, about) in known.items()},
        }
        with suppress(OSError):
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._cache, json.dumps(content))


Known = dict[str, tuple[Stamp, Overview]]


def look_into(path: Path) -> Overview:
    """The line about one recording; of a damaged one, a sentence that says so."""
    try:
        return overview(glimpse(path))
    except SessionError as error:
        return Overview(path.name, problem=str(error))
    except (*DAMAGED, OSError):
        return Overview(path.name, problem=f"{path} is damaged: what it says of itself cannot be understood.")


def _load(cache: Path) -> Known:
    try:
        content = json.loads(cache.read_bytes())
        if content["version"] != CACHE_VERSION:
            return {}
        return {str(key): _entry(value) for key, value in content["known"].items()}
    except (OSError, *DAMAGED):
        return {}


def _entry(value: Mapping[str, Any]) -> tuple[Stamp, Overview]:
    size, files, changed_ns = map(int, value["stamp"])
    return Stamp(size, files, changed_ns), Overview.from_json(value["about"])
