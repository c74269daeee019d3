"""The process that follows a recording and tells other programs of it. It writes only whose full detail is wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from zerotop.analysis.ranks.nodes import find_wanted_nodes
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.common.node_orders import has_nodes, want_nodes
from zerotop.commands.publishing.notifications import Notifier
from zerotop.recording.reader import Recording, RecordingError

_POLL_S = 1.0
# A job that is being started has neither a process nor an end in its recording.
_START_S = 30.0


class Subscriber(Protocol):
    """Somebody who is told. Neither method raises nor takes long."""

    def update(self, source: RecordingSource) -> None:
        """Tell what is new; called after each reading of the recording."""

    def finish(self, source: RecordingSource) -> None:
        """Tell that the job has ended, or that its recording has."""


def publish(targets: dict[str, Any]) -> None:
    """Follow the recording that ``targets`` names until its job has ended."""
    try:
        recording = RunningRecording.open(Path(targets["recording"]))
    except RecordingError:  # the job could not be started, so its recording was removed
        return
    follow(recording, _make_subscribers(targets))


def _make_subscribers(targets: dict[str, Any]) -> list[Subscriber]:
    subscribers: list[Subscriber] = []
    if notify := targets.get("notify"):
        subscribers.append(Notifier(notify, tell))
    if folder := targets.get("prometheus_textfile"):
        from zerotop.commands.publishing.prometheus import PrometheusFile

        subscribers.append(PrometheusFile(Path(folder), tell))
    if address := targets.get("prometheus_port"):
        from zerotop.commands.publishing.prometheus import PrometheusPort

        host, port = address
        subscribers.append(PrometheusPort(host, port, tell))
    if targets.get("otlp"):
        from zerotop.commands.publishing.otlp import OtlpSender

        subscribers.append(OtlpSender(tell))
    return subscribers


def tell(sentence: str) -> None:
    """Leave a sentence for the user, who reads it when the job has ended."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def follow(recording: Recording, subscribers: Sequence[Subscriber], sleep: Callable[[float], None] = time.sleep) -> None:
    """Read the recording again and again, and tell the subscribers, until its job has ended."""
    source = RecordingSource(recording)
    begin_s = time.monotonic()
    while True:
        with suppress(RecordingError):  # removed meanwhile: then the job is all that can be followed
            source.refresh()
        while source.search_findings().is_behind:
            pass
        is_starting = not recording.is_over and not source.job_steps.size and time.monotonic() - begin_s < _START_S
        if not (source.is_live or is_starting):
            break
        want_detail(source)
        subscribers = [one for one in subscribers if _try(one.update, source)]
        sleep(_POLL_S)
    for subscriber in subscribers:
        _try(subscriber.finish, source)


def want_detail(source: RecordingSource) -> None:
    """Ask nodes with findings for full detail, as screens do, where not all nodes send it."""
    if has_nodes(source.recording.path):
        with suppress(OSError):
            want_nodes(
                source.recording.path, find_wanted_nodes(source.recording, source.end_ns, source.findings_at(None), None)
            )


def _try(inform: Callable[[RecordingSource], None], source: RecordingSource) -> bool:
    """Return whether it worked. One that fails never keeps the others from their news."""
    try:
        inform(source)
    except Exception as error:
        name = type(inform.__self__).__name__ if hasattr(inform, "__self__") else "a subscriber"
        tell(f"{name} of zerotop failed and was left out from then on: {type(error).__name__}: {error}")
        return False
    return True
