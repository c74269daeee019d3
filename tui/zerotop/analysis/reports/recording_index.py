"""All recordings in a folder with their summaries, cached until a recording changes.

The time for which a job held its GPUs, and for how much of it no kernel ran.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerotop.analysis.findings import Severity
from zerotop.analysis.reports.end_summary import select_costly
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.reports.recording_summary import Overview, build_overview
from zerotop.recording import catalog
from zerotop.recording.atomic_write import write_text_file
from zerotop.recording.headers import DAMAGE_ERRORS
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.quick_read import Stamp, open_glimpse, read_stamp
from zerotop.recording.reader import SILENCE_NS, Recording, RecordingError


def measure_gpu_time(recording: Recording, seconds: float) -> tuple[float, float]:
    """Return the seconds of all GPUs on which ranks allocated, and for how many of them no kernel ran; NaN: unknown.

    ``seconds`` is how long the job held each of them. A sample of NVML's utilization counts until the next one.
    """
    used = set(locate_allocators(recording.at()).values())
    idle_shares = []
    for source in recording.sources["gpus"]:
        times = source.unix_times(source.array)
        for host, index in used:
            if host != source.host:
                continue
            mine = source.array["gpu"] == index
            percent, lasting = source.array["utilization_percent"][mine][:-1], np.diff(times[mine])
            known = np.isfinite(percent) & (lasting > 0)
            if known.any():
                idle_shares.append(1 - float(np.average(percent[known], weights=lasting[known])) / 100)
    recording.release_memory()
    if not used or math.isnan(seconds):
        return math.nan, math.nan
    if len(idle_shares) != len(used):
        return seconds * len(used), math.nan
    return seconds * len(used), seconds * sum(max(0.0, share) for share in idle_shares)


CACHE_VERSION = 8
"""Increased whenever the content of an overview changes."""

# Findings are searched in the newest recordings, and not in very large ones: it takes a second for each 10 MiB or so.
_MOST_JUDGED, _MOST_JUDGED_BYTES = 30, 256 << 20


@dataclass(frozen=True, slots=True)
class ListedRecording:
    """A recording in the list; ``overview`` is None until it has been read."""

    path: Path
    stamp: Stamp
    is_live: bool
    overview: Overview | None

    @property
    def name(self) -> str:
        """The file name, which commands accept as RECORDING."""
        return self.path.name

    @property
    def begin_ns(self) -> int:
        """When the recording began; before it has been read, when the file last changed."""
        return self.overview.begin_ns if self.overview is not None and self.overview.begin_ns else self.stamp.changed_ns

    @property
    def duration_s(self) -> float:
        """The duration in seconds; NaN before it has been read."""
        return self.overview.seconds if self.overview is not None else float("nan")


class Overviews:
    """The recordings of a folder, newest first. :meth:`list_recordings` opens none, :meth:`read_next` opens one."""

    def __init__(self, root: Path, cache: Path | None, is_job_running: Callable[[Path], bool]) -> None:
        """``cache``: file that keeps the summaries; ``is_job_running``: whether a recording's job runs on this machine."""
        self._root = root
        self._cache = cache
        self._is_job_running = is_job_running
        self._known_overviews = _load_cache(cache) if cache is not None else {}
        self._saved_overviews = dict(self._known_overviews)
        self._judged: set[tuple[Path, Stamp]] = set()
        self._ended_recordings: set[tuple[Path, Stamp]] = set()  # without a recorded end, but their job is gone
        self.recordings: tuple[ListedRecording, ...] = ()

    def list_recordings(self) -> tuple[ListedRecording, ...]:
        """List the folder without opening a recording."""
        recordings = filter(None, map(self._build_recording, catalog.list_recordings(self._root)))
        self.recordings = tuple(sorted(recordings, key=lambda recording: recording.begin_ns, reverse=True))
        return self.recordings

    def _build_recording(self, path: Path) -> ListedRecording | None:
        try:
            stamp = read_stamp(path)
        except OSError:  # deleted meanwhile
            return None
        cached_stamp, overview = self._known_overviews.get(str(path), (None, None))
        live = path.is_dir() and self._is_live(path, stamp, overview if cached_stamp == stamp else None)
        # A growing recording keeps its previous summary until it is read again.
        return ListedRecording(path, stamp, live, overview if cached_stamp == stamp or live else None)

    def _is_live(self, path: Path, stamp: Stamp, overview: Overview | None) -> bool:
        if overview is not None and (overview.over or overview.problem):
            return False
        written_ns = stamp.changed_ns if overview is None else overview.end_ns
        if time.time_ns() - written_ns < SILENCE_NS:
            return True
        # An ended job does not start again without a change to the recording.
        if (path, stamp) in self._ended_recordings:
            return False
        is_running = self._is_job_running(path)
        if not is_running:
            self._ended_recordings.add((path, stamp))
        return is_running

    def read_next(self) -> ListedRecording | None:
        """Read the newest changed recording and return it; None if all summaries are up to date."""
        for recording in self.recordings:
            if self._known_overviews.get(str(recording.path), (None,))[0] != recording.stamp:
                return self._read_recording(recording)
        return None

    def judge_next(self, most: int | None = _MOST_JUDGED) -> ListedRecording | None:
        """Search the findings of the newest ended recording without them; None if the ``most`` newest have theirs."""
        for recording in self.recordings[:most]:
            overview, key = recording.overview, (recording.path, recording.stamp)
            is_due = overview is not None and overview.worst is None and not (recording.is_live or overview.problem)
            if overview is not None and is_due and key not in self._judged and recording.stamp.bytes <= _MOST_JUDGED_BYTES:
                self._judged.add(key)
                return self._replace_overview(recording, judge_recording(recording.path, overview))
        return None

    def _read_recording(self, recording: ListedRecording) -> ListedRecording:
        return self._replace_overview(recording, read_overview(recording.path))

    def _replace_overview(self, recording: ListedRecording, overview: Overview) -> ListedRecording:
        self._known_overviews[str(recording.path)] = (recording.stamp, overview)
        live = recording.is_live and self._is_live(recording.path, recording.stamp, overview)
        updated = replace(recording, overview=overview, is_live=live)
        others = [other for other in self.recordings if other.path != recording.path]
        self.recordings = tuple(sorted([*others, updated], key=lambda other: other.begin_ns, reverse=True))
        return updated

    def read_all(self) -> tuple[ListedRecording, ...]:
        """List the folder and read all changed recordings."""
        self.list_recordings()
        while self.read_next() is not None:
            pass
        self.save_cache()
        return self.recordings

    def save_cache(self) -> None:
        """Write the summaries to the cache; if that fails, the next run reads the recordings again."""
        paths = {str(recording.path) for recording in self.recordings}
        known = {key: value for key, value in self._known_overviews.items() if key in paths}
        if self._cache is None or known == self._saved_overviews:
            return
        self._saved_overviews = known
        content = {
            "version": CACHE_VERSION,
            "known": {key: {"stamp": list(stamp), "about": overview.as_json()} for key, (stamp, overview) in known.items()},
        }
        with suppress(OSError):
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text_file(self._cache, json.dumps(content))


KnownOverviews = dict[str, tuple[Stamp, Overview]]


def read_overview(path: Path) -> Overview:
    """Summarize one recording; if it is damaged, the overview states the problem."""
    try:
        return build_overview(open_glimpse(path))
    except RecordingError as error:
        return Overview(path.name, problem=str(error))
    except Exception:  # one recording never breaks the list, whatever is in it
        return Overview(path.name, problem=f"{path} is damaged: its metadata cannot be read.")


def judge_recording(path: Path, overview: Overview) -> Overview:
    """Return a recording's overview with its findings and GPU time; without them where the search fails."""
    try:
        run = RecordedRun(Recording.open(path))
        steps = run.source.job_steps
        costs = select_costly(rank_findings(run.findings, steps, run.source.end_ns))
        gpu_s, idle_gpu_s = measure_gpu_time(run.recording, overview.seconds)
    except Exception:  # one recording never breaks the list, whatever is in it
        return overview
    share = costs[0].share if costs else None
    return replace(
        overview,
        steps=run.view.progress.finished_steps,  # of all ranks, of which the overview read the lowest
        worst=costs[0].finding.headline if costs else "",
        worst_name=costs[0].finding.name if costs else "",
        worst_share=math.nan if share is None else share,
        lost_s=costs[0].seconds if costs and costs[0].seconds else math.nan,
        findings=tuple(one.name for one in run.findings if one.severity is not Severity.INFO),
        gpu_s=gpu_s,
        idle_gpu_s=idle_gpu_s,
    )


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
