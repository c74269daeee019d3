"""Starting the process that tells other programs of a job, and its sentences when the job has ended."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.exit_messages import write_messages
from zerotop_probe.outside import own_python
from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.outside.job import job_control

# How long the end of a job may take to be told; the job is over by then.
_WAIT_S = 15.0
_LOCATION = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def check_targets(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is to be told to whom; empty: nothing. Raise Problem before the job where that cannot work."""
    targets: dict[str, Any] = {}
    if options.notify is not None:
        location = _LOCATION.match(options.notify)
        if location and location[1].lower() not in ("http", "https"):
            raise Problem(f"--notify takes a command or an address with http:// or https://, not {location[0]}", USAGE)
        if not options.notify.strip():
            raise Problem("--notify needs a command or an address", USAGE)
        targets["notify"] = options.notify
    if options.prometheus_textfile is not None:
        targets["prometheus_textfile"] = _check_folder(options.prometheus_textfile)
    if options.prometheus_port is not None:
        targets["prometheus_port"] = options.prometheus_port
    if "prometheus_textfile" in targets or "prometheus_port" in targets:
        _check_extra("prometheus_client", "prometheus", "Metrics for Prometheus need the package prometheus-client")
    if options.otlp:
        check_protocol()
        _check_extra("opentelemetry.exporter.otlp.proto.http", "otlp", "--otlp needs the SDK of OpenTelemetry")
        targets["otlp"] = True
    return targets


def check_protocol() -> None:
    """Raise Problem if the environment asks for a protocol that is not sent to OpenTelemetry."""
    for name in ("", "METRICS_", "LOGS_"):
        variable = f"OTEL_EXPORTER_OTLP_{name}PROTOCOL"
        if (protocol := os.environ.get(variable, "http/protobuf").strip()) not in ("", "http/protobuf"):
            raise Problem(f"Only http/protobuf is sent to OpenTelemetry, and {variable} asks for {protocol}", USAGE)


def _check_folder(folder: str) -> str:
    if not os.path.isdir(folder):
        raise Problem(f"Not started: there is no folder {folder} for --prometheus-textfile", USAGE)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Problem(f"Not started: nothing can be written to {folder}, the folder of --prometheus-textfile", USAGE)
    return os.path.abspath(folder)


def _check_extra(module: str, extra: str, need: str) -> None:
    """Raise Problem if a package is not installed; it is not imported here, where the job is started."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the packages that it is in
        is_there = False
    if not is_there:
        raise Problem(f"Not started: {need}: pip install 'zerotop[{extra}]'", USAGE)


@contextmanager
def accompany(recording: str, targets: dict[str, Any]) -> Iterator[None]:
    """Tell the targets of the job that is recorded there, while the block runs and then as long as the job does.

    At the end of the block wait a while for the last news, if the job has ended, and write the sentences about what failed.
    """
    if not targets:
        yield
        return
    with tempfile.TemporaryFile() as sentences:
        publisher = _start(recording, targets, sentences.fileno())
        try:
            yield
        except Exception:
            if publisher is not None and not job_control.is_job_alive(recording):  # it was not started
                publisher.kill()
                publisher.wait()
            raise
        if publisher is not None:
            _await_end(publisher, recording)
            sentences.seek(0)
            write_messages(*dict.fromkeys(sentences.read().decode(errors="replace").splitlines()))


def _start(recording: str, targets: dict[str, Any], errors: int) -> subprocess.Popen[bytes] | None:
    command = own_python.build_command("zerotop.commands.publishing.__main__")
    try:
        publisher = subprocess.Popen(
            command,
            env=own_python.build_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        write_messages(f"Nobody will be told of this job: no process can be started for it, {describe_cause(error)}")
        return None
    assert publisher.stdin is not None
    with suppress(OSError), publisher.stdin:
        # Not as arguments: addresses of webhooks are secrets, and everybody can list arguments.
        publisher.stdin.write(json.dumps({"recording": os.path.abspath(recording), **targets}).encode())
    return publisher


def _await_end(publisher: subprocess.Popen[bytes], recording: str) -> None:
    if job_control.is_job_alive(recording):
        return
    try:
        publisher.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        write_messages("The last news of the job are still on their way: whoever is told of them does not answer")
