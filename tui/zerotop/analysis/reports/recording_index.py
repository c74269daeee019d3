"""All recordings in one place, each in a line. What was found out about one is kept until it changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotop.analysis.reports.recording_summary import Overview, build_overview
from zerotop.session import catalog
from zerotop.session.atomic_write import write_text_file
from zerotop.session.headers import DAMAGE_ERRORS
from zerotop.session.quick_read import Stamp, open_glimpse, read_stamp
from zerotop.session.reader import SessionError

CACHE_VERSION = 2
"""Raised when an overview says something else than before."""

# Silence after which a recording whose end nobody saw counts as ended, as in the reader.
_LIVE_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording in the list; ``about`` is None until it was looked into."""

    path: Path
    is_packed: bool
    stamp: Stamp
    is_live: bool
    overview: Overview | None

    @property
    def name(self) -> str:
        """What its file is called, which is what other commands take."""
        return self.path.name

    @property
    def begin_ns(self) -> int:
        """When it was made; until that is known, when it was last changed."""
        return self.overview.begin_ns if self.overview is not None and self.overview.begin_ns else self.stamp.changed_ns

    @property
    def duration_s(self) -> float:
        """How long it is."""
        return self.overview.seconds if self.overview is not None else float("nan")


class Overviews:
    """The recordings of a folder, newest first. Reads nothing in :meth:`look`, and one of them in :meth:`read_next`."""

    def __init__(self, root: Path, cache: Path | None, job_runs: Callable[[Path], bool]) -> None:
        """``cache`` is where to keep what was found out; ``job_runs`` says of a session whether its job does, here."""
        self._root = root
        self._cache = cache
        self._is_job_running = job_runs
        self._known_overviews = _load_cache(cache) if cache is not None else {}
        self._saved_overviews = dict(self._known_overviews)
        self._ended_recordings: set[tuple[Path, Stamp]] = set()  # recordings whose job was found to be over, unseen
        self.recordings: tuple[Recording, ...] = ()

    def list_recordings(self) -> tuple[Recording, ...]:
        """Lists what there is now."""
        found = [
            recording for path in catalog.list_sessions(self._root) if (recording := self._build_recording(path)) is not None
        ]
        self.recordings = tuple(sorted(found, key=lambda recording: recording.begin_ns, reverse=True))
        return self.recordings

    def _build_recording(self, path: Path) -> Recording | None:
        try:
            now = read_stamp(path)
        except OSError:  # it was deleted under us
            return None
        key = str(path)
        packed = not path.is_dir()
        before, about = self._known_overviews.get(key, (None, None))
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
        if (path, now) in self._ended_recordings:
            return False
        runs = self._is_job_running(path)
        if not runs:
            self._ended_recordings.add((path, now))
        return runs

    def read_next(self) -> Recording | None:
        """Looks into the newest one that has changed since; None when there is none."""
        for recording in self.recordings:
            if self._known_overviews.get(str(recording.path), (None,))[0] != recording.stamp:
                return self._read_recording(recording)
        return None

    def _read_recording(self, recording: Recording) -> Recording:
        about = read_overview(recording.path)
        self._known_overviews[str(recording.path)] = (recording.stamp, about)
        live = recording.is_live and self._is_live(recording.path, recording.stamp, about)
        fresh = replace(recording, overview=about, is_live=live)
        others = [other for other in self.recordings if other.path != recording.path]
        self.recordings = tuple(sorted([*others, fresh], key=lambda each: each.begin_ns, reverse=True))
        return fresh

    def read_all(self) -> tuple[Recording, ...]:
        """Lists what there is, and looks into all that has changed."""
        self.list_recordings()
        while self.read_next() is not None:
            pass
        self.save_cache()
        return self.recordings

    def save_cache(self) -> None:
        """Keeps what was found out. Where that cannot be written it is found out again."""
        here = {str(recording.path) for recording in self.recordings}
        known = {key: value for key, value in self._known_overviews.items() if key in here}
        if self._cache is None or known == self._saved_overviews:
            return
        self._saved_overviews = known
        content = {
            "version": CACHE_VERSION,
            "known": {key: {"stamp": list(of), "about": about.as_json()} for key, (of, about) in known.items()},
        }
        with suppress(OSError):
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text_file(self._cache, json.dumps(content))


KnownOverviews = dict[str, tuple[Stamp, Overview]]


def read_overview(path: Path) -> Overview:
    """The line about one recording; of a damaged one, a sentence that says so."""
    try:
        return build_overview(open_glimpse(path))
    except SessionError as error:
        return Overview(path.name, problem=str(error))
    except (*DAMAGE_ERRORS, OSError):
        return Overview(path.name, problem=f"{path} is damaged: what it says of itself cannot be understood.")


def _load_cache(cache: Path) -> KnownOverviews:
    try:
        content = json.loads(cache.read_bytes())
        if content["version"] != CACHE_VERSION:
            return {}
        return {str(key): _parse_entry(value) for key, value in content["known"].items()}
    except (OSError, *DAMAGE_ERRORS):
        return {}


def _parse_entry(value: Mapping[str, Any]) -> tuple[Stamp, Overview]:
    size, files, changed_ns = map(int, value["stamp"])
    return Stamp(size, files, changed_ns), Overview.from_json(value["about"])
