"""Every allocation and every free of the next steps, on request: PyTorch's own history, without stacks unless asked for.

The request is a file in the session's directory, so that whoever can write there can ask. The steps themselves cost next
to nothing more; what was found is written after them, on the training thread, which takes a moment then.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import Meter, Part, now
from zerotop_probe.recording import events
from zerotop_probe.recording.clock import clock_pair
from zerotop_probe.recording.directory import MICROSCOPE_FILE
from zerotop_probe.recording.tables import HISTORY, HISTORY_ACTIONS
from zerotop_probe.recording.writer import Identity, RecordWriter

_CODES = {name: code for code, name in enumerate(HISTORY_ACTIONS)}
_MOST_STEPS = 100
# Each entry takes some hundred bytes in the process, and some thousand with its stack.
_MOST_ENTRIES = 1_000_000
_MOST_WITH_STACKS = 100_000


class Microscope:
    """Looks at the allocator of one device, a few steps at a time."""

    def __init__(
        self,
        session: str,
        identity: Identity,
        device: int,
        memory: Any,
        write_event: Callable[..., None],
        meter: Meter,
        refusal: str = "",
    ) -> None:
        """``device`` is the process's own ordinal, ``memory`` is ``torch.cuda.memory``.

        ``refusal``: why every request is refused, as a sentence, where PyTorch keeps no history of this allocator.
        """
        self._refusal = refusal
        self._session = session
        self._identity = identity
        self._device = device
        self._memory = memory
        self._write_event = write_event
        self._part = Part("microscope", meter)
        self._path = os.path.join(session, MICROSCOPE_FILE)
        # What was asked for before there was a probe here is not for us: it may be of the attempt before, hours ago.
        self._seen_ns = self._asked_ns()
        self._wanted: tuple[int, int, bool] | None = None
        self._look: _Look | None = None
        self._writer: RecordWriter | None = None

    @property
    def lost(self) -> int:
        """Records that could not be written so far."""
        return self._writer.lost if self._writer is not None else 0

    def _asked_ns(self) -> int:
        """When the last request was made; 0 where there is none."""
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0

    def poll(self, step: int, micro_step: int, phase: int) -> None:
        """Takes a new request in; for the ticker."""
        asked_ns = self._asked_ns()
        if asked_ns in (0, self._seen_ns):
            return
        self._seen_ns = asked_ns
        # Whatever else somebody may have put there is no request.
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError), open(self._path, "rb") as file:
            wanted = json.load(file)
            steps = min(max(1, int(wanted["steps"])), _MOST_STEPS)
            self._wanted = (int(wanted["request"]), steps, bool(wanted.get("stacks")))

    def step_ended(self, step: int) -> None:
        """At the end of every optimizer step, on the training thread."""
        if self._look is not None:
            self._part.run(self._go_on, self._look, step)
        elif self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._part.run(self._begin, step, *wanted)

    def _begin(self, step: int, request: int, steps: int, stacks: bool) -> None:
        look = _Look(request, steps, stacks, step + 1, now())
        why = self._refusal
        if not why and any(self._snapshot()["device_traces"]):
            why = "The job records PyTorch's memory history itself."
        if why:
            self._told(look, "refused", why=why)
            return
        context, most = ("alloc", _MOST_WITH_STACKS) if stacks else (None, _MOST_ENTRIES)
        look.baseline = self._allocated()
        self._memory._record_memory_history("all", context=context, stacks="python", max_entries=most)
        self._look = look

    def _go_on(self, look: _Look, step: int) -> None:
        if step + 1 < look.first_step + look.steps:
            return
        self._look = None
        look.end_ns = now()
        snapshot = self._snapshot()
        self._memory._record_memory_history(None)
        history = snapshot["device_traces"][self._device]
        self._write(look, history)
        file = self._keep(look, snapshot) if look.stacks else None
        self._told(look, "recorded", entries=len(history), snapshot=file, seconds=(now() - look.end_ns) / 1e9)

    def _snapshot(self) -> Any:
        return self._memory._snapshot()

    def _allocated(self) -> dict[str, int]:
        stats = self._memory.memory_stats(self._device)
        return {
            "allocated_bytes": int(stats["allocated_bytes.all.current"]),
            "requested_bytes": int(stats.get("requested_bytes.all.current", -1)),
            "reserved_bytes": int(stats["reserved_bytes.all.current"]),
        }

    def _write(self, look: _Look, history: list[dict[str, Any]]) -> None:
        if self._writer is None:
            self._writer = RecordWriter(self._session, HISTORY, self._identity)
        pair = clock_pair()
        behind_ns = pair["unix_ns"] - pair["monotonic_ns"]
        for entry in history:
            code = _CODES.get(entry["action"])
            if code is not None:
                time_ns = entry["time_us"] * 1000 - behind_ns
                self._writer.write(time_ns, entry["addr"], entry["size"], look.request, code, self._device)

    def _keep(self, look: _Look, snapshot: Any) -> str | None:
        """PyTorch's own file for its viewer, beside the recording. zerotop itself never reads it."""
        name = f"microscope-{self._identity.stem}-{look.request}.pickle"
        try:
            with open(os.path.join(self._session, name), "xb") as file:
                pickle.dump(snapshot, file)
        except OSError:
            return None
        return name

    def _told(self, look: _Look, state: str, **more: Any) -> None:
        end_ns = look.end_ns or look.begin_ns
        facts = {"first_step": look.first_step, "steps": look.steps, "begin_ns": look.begin_ns, "end_ns": end_ns}
        self._write_event(
            now(), events.MICROSCOPE, request=look.request, state=state, **facts, baseline=look.baseline, **more
        )

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class _Look:
    """One request while it is carried out."""

    def __init__(self, request: int, steps: int, stacks: bool, first_step: int, begin_ns: int) -> None:
        self.request = request
        self.steps = steps
        self.stacks = stacks
        self.first_step = first_step
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.baseline: dict[str, int] = {}
