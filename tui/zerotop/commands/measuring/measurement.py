"""The measurement of ``doctor --measure``: the program of :mod:`.figures` with a time limit, and its result in a table."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from zerotop.analysis.text_tables import align_columns
from zerotop.commands.measuring.machine_file import FIGURES, MachineFigures, find_machine_file, write_figures

LIMIT_S = 20.0
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def measure_machine(*, is_json: bool) -> int:
    """Measure, keep and print. Return 0, or 1 if nothing could be measured or kept."""
    begin = time.monotonic()
    figures = run_measurement()
    path = find_machine_file()
    kept = f"kept in {path}"
    is_kept = bool(figures.values)
    try:
        if is_kept:
            write_figures(figures, path)
    except OSError as error:
        kept, is_kept = f"not kept: {path}: {error.strerror}; set XDG_CACHE_HOME to a writable directory", False
    if is_json:
        print(json.dumps({**asdict(figures), "file": str(path) if is_kept else None}, indent=1))
        return int(not is_kept)
    print(*align_columns(list_rows(figures), "<>"), sep="\n")
    for reason, names in group_reasons(figures).items():
        print(f"not measured: {', '.join(FIGURES[name].title for name in names)}. {reason}")
    if figures.values:
        print(f"measured in {time.monotonic() - begin:.1f} s, {kept}")
    return int(not is_kept)


def list_rows(figures: MachineFigures) -> Iterator[tuple[str, str]]:
    for name, figure in FIGURES.items():
        value = figures.values.get(name)
        if value is not None:
            scale, prefix = next((pair for pair in _SCALES if value >= pair[0]), _SCALES[-1])
            text = f"{value / scale:,.2f} {prefix}{figure.unit}" if figure.unit != "elements/s" else ""
            yield figure.title, text or f"{value / 1e6:,.0f} M elements/s"


def group_reasons(figures: MachineFigures) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in figures.reasons.items():
        groups.setdefault(reason, []).append(name)
    return groups


def run_measurement(limit_s: float = LIMIT_S, command: list[str] | None = None) -> MachineFigures:
    """Return what the program printed until it ended or its time was over. ``command``: another program, for tests."""
    command = command or [sys.executable, "-m", "zerotop.commands.measuring.figures"]
    values: dict[str, float] = {}
    reasons: dict[str, str] = {}
    torch = ""
    ended = "The program that measures ended before it came to this."
    with tempfile.TemporaryFile() as output:
        # A process group of its own, which has the ranks of the all-reduce, too.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = f"The limit of {limit_s:.0f} s was over before it came to this: is the machine busy?"
        finally:
            _end_group(process)
        output.seek(0)
        for line in _parse_lines(output.read()):
            name = str(line.get("name"))
            if name == "torch":
                torch = str(line.get("version") or "")
            elif name in FIGURES and isinstance(line.get("value"), int | float) and line["value"] > 0:
                values[name] = float(line["value"])
            elif name in FIGURES:
                reasons[name] = str(line.get("reason") or f"The measured value is {line.get('value')}, which is none.")
    reasons |= {name: ended for name in FIGURES if name not in values and name not in reasons}
    return MachineFigures(socket.gethostname(), time.time(), read_gpu_name(), torch, values, reasons)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # in a call of the driver that does not return
        process.wait(1)


def _parse_lines(output: bytes) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue  # a library's own output
        if isinstance(content, dict):
            yield content


def read_gpu_name() -> str:
    """Return the name of the first GPU by NVML; "" without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return ""
