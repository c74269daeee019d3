"""Entering and leaving the ranks of a job. All ranks are asked first, then all answers are awaited."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching import jupyter_kernels, payload, remote_exec
from zerotop_probe.outside.attaching.injector import PlantedCode, State, plant_code
from zerotop_probe.outside.attaching.python_process import REMOTE_EXEC_VERSION, CannotEnter, examine_process
from zerotop_probe.outside.procfs import ProcessHandle

_POLL_S = 0.005
# A rank that takes longer to answer is in a long C call, or hangs.
PATIENCE_S = 5.0
# A rank that is importing modules is asked again for this long, with growing pauses: it may compile DeepSpeed's operators.
_IMPORT_S = 60.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 2.0

_PENDING = (
    "its main thread has not answered for {seconds:.0f} s: it is in one C call, such as a long operator or a waiting "
    "collective, or gets no core. It will respond after that; py-spy dump --pid {pid} shows where it is"
)
_SILENT = "it did not answer, because it cannot write to {folder}. Choose another folder with --recording"
_IMPORTING = "it is importing modules and cannot be entered meanwhile. Try again when it trains"
_EARLY = "it has not imported PyTorch yet. Try again when it trains"
_IDLE_KERNEL = "it is an idle Jupyter kernel, waiting for the next cell"
_LEAVING = "it is leaving another recording at the end of its step. Try again then"
_NOT_NOW = {"early": _EARLY, "importing": _IMPORTING}  # by the probe's reply
_ELSEWHERE = "it is already recorded in {folder}. End that with zerotop detach {quoted}"


@dataclass(frozen=True)
class Entry:
    """The result for one process."""

    process: ProcessHandle
    reply: str = ""  # the probe's reply, see ``hook_installer``
    why_not: str = ""  # why it failed, without a final period; "" if it succeeded
    is_pending: bool = False  # it was asked and will do it later
    stopped_s: float = 0.0  # how long it was stopped


class ProbeCall:
    """A request to one process, and its answer."""

    def __init__(self, process: ProcessHandle, recording: str, action: str, *arguments: str) -> None:
        """Send the request. Raises CannotEnter."""
        self.process = process
        self._recording = recording
        self._is_entering = action == "enter"
        self._answer_path = payload.answer_path(recording, process)
        self.began_s = time.monotonic()
        self._planted: PlantedCode | None = None
        self._script_path = ""
        target = examine_process(process)
        payload.create_answer(self._answer_path, process)
        text = payload.make_call(self._answer_path, action, *arguments)
        try:
            if target.version >= REMOTE_EXEC_VERSION:
                self._script_path = payload.script_path(recording, process)
                payload.write_file(self._script_path, payload.make_script(self._script_path, text), process)
                remote_exec.request_script(target, self._script_path)
            else:
                self._planted = plant_code(target, text)
        except CannotEnter:
            self._remove_files()
            raise

    def poll_entry(self) -> Entry | None:
        """Return the result, or None while there is none."""
        try:
            is_done = self._planted is not None and self._planted.read_state() is State.DONE
            if not self.process.is_alive():
                raise ProcessLookupError(self.process.pid)
        except ProcessLookupError:
            self._remove_files()
            return self._make_entry(why_not="it has ended")
        reply = payload.take_answer(self._answer_path)
        if reply is None:
            return self._make_entry(why_not=_SILENT.format(folder=self._recording)) if is_done else None
        if reply.startswith("! "):
            return self._make_entry(why_not=f"the probe failed there ({reply[2:]})")
        return self._make_entry(
            reply=reply, why_not=_describe_refusal(reply, self._recording if self._is_entering else None)
        )

    def make_overdue(self) -> Entry:
        """Return the result for a process that has not answered in time."""
        payload.remove_file(self._answer_path)  # the script stays, as the process will execute it
        seconds = time.monotonic() - self.began_s
        is_kernel = jupyter_kernels.is_kernel(procfs.read_command_line(self.process.pid))
        reason = _IDLE_KERNEL if is_kernel else _PENDING.format(seconds=seconds, pid=self.process.pid)
        return self._make_entry(why_not=reason, is_pending=True)

    def _remove_files(self) -> None:
        payload.remove_file(self._answer_path)
        if self._script_path:
            payload.remove_file(self._script_path)

    def _make_entry(self, *, reply: str = "", why_not: str = "", is_pending: bool = False) -> Entry:
        stopped_s = self._planted.stopped_s if self._planted is not None else 0.0
        return Entry(self.process, reply, why_not, is_pending, stopped_s)


def _describe_refusal(reply: str, folder: str | None) -> str:
    """Explain a reply of ``hook_installer``; ``folder`` is the recording to enter, None when leaving."""
    if folder is not None and reply == "leaving":
        return _LEAVING
    if folder is not None and os.path.isabs(reply) and os.path.realpath(reply) != os.path.realpath(folder):
        return _ELSEWHERE.format(folder=reply, quoted=shlex.quote(reply))
    return _NOT_NOW.get(reply, "")


def call_probes(
    processes: Iterable[ProcessHandle], recording: str, action: str, *arguments: str, patience_s: float = PATIENCE_S
) -> list[Entry]:
    """Call ``action`` of ``hook_installer`` in each process; wait at most ``patience_s`` for the answer to each call."""
    entries: list[Entry] = []
    waiting: list[ProbeCall] = []
    now_s = time.monotonic()
    import_deadline_s, retry_s = now_s + _IMPORT_S, _FIRST_RETRY_S
    due_s = dict.fromkeys(processes, now_s)
    while due_s or waiting:
        for process in [process for process, at_s in due_s.items() if at_s <= now_s]:
            del due_s[process]
            try:
                waiting.append(ProbeCall(process, recording, action, *arguments))
            except CannotEnter as error:
                entries.append(Entry(process, why_not=str(error)))
        now_s = time.monotonic()
        answers = [(call, call.poll_entry()) for call in waiting]
        waiting = [call for call, entry in answers if entry is None]
        for entry in (entry for _, entry in answers if entry is not None):
            if entry.reply == "importing" and now_s < import_deadline_s:
                due_s[entry.process] = now_s + retry_s
                retry_s = min(_LAST_RETRY_S, 1.5 * retry_s)
            else:
                entries.append(entry)
        overdue = [call for call in waiting if now_s > call.began_s + patience_s]
        waiting = [call for call in waiting if call not in overdue]
        entries += [call.make_overdue() for call in overdue]
        time.sleep(_POLL_S if due_s or waiting else 0)
    return entries


def enter_processes(processes: Iterable[ProcessHandle], recording: str, *, patience_s: float = PATIENCE_S) -> list[Entry]:
    """Load the probe into each of these ranks to record to ``recording``. Ranks that have it already are unchanged."""
    folder = os.path.abspath(recording)
    return call_probes(processes, folder, "enter", folder, patience_s=patience_s)


def leave_processes(processes: Iterable[ProcessHandle], recording: str) -> list[Entry]:
    """Unload the probe from each of these ranks."""
    return call_probes(processes, os.path.abspath(recording), "leave")
