"""Figures of this machine in the user's cache directory (XDG base directories): written by ``doctor --measure``."""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
_MOST_BYTES = 1 << 16
_MOST_AGE_S = 180 * 86400.0  # drivers and libraries change


@dataclass(frozen=True, slots=True)
class Figure:
    """The name of a figure, as people and as the file call it."""

    title: str
    unit: str


FIGURES = {
    "memory_copy": Figure("host memory copy", "B/s"),
    "adam_per_core": Figure("CPU AdamW, one core", "elements/s"),
    "adam": Figure("CPU AdamW, all cores", "elements/s"),
    "matrix_product": Figure("bf16 matrix product", "FLOP/s"),
    "to_gpu": Figure("copy to the GPU", "B/s"),
    "from_gpu": Figure("copy from the GPU", "B/s"),
    "all_reduce": Figure("all-reduce", "B/s"),
    "context": Figure("CUDA context", "B"),
    "workspace": Figure("cuBLAS workspace", "B"),
    "process": Figure("process in host memory", "B"),
    "nccl": Figure("NCCL's memory", "B"),
}


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What was measured, and why the rest was not."""

    host: str
    unix_s: float
    gpu: str = ""  # its name; "" without one
    torch: str = ""  # its version; "" without it
    values: dict[str, float] = field(default_factory=dict)  # by the names of FIGURES
    reasons: dict[str, str] = field(default_factory=dict)  # as sentences
    version: int = VERSION


class MachineFileError(Exception):
    """The file cannot be used; the text is the reason, as a sentence."""


def find_machine_file() -> Path:
    """Return the path of this machine's file. A home folder that machines share has one for each."""
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "zerotop" / f"machine-{''.join(c if c.isalnum() else '-' for c in socket.gethostname())}.json"


def write_figures(figures: MachineFigures, path: Path) -> None:
    """Write the file in one piece. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(figures), file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_figures(path: Path, *, now_s: float | None = None) -> MachineFigures | None:
    """Return the figures; None if nothing was measured. Raises MachineFileError for a file that cannot be used."""
    again = "measure again with zerotop doctor --measure."
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_MOST_BYTES + 1))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MachineFileError(f"The measurements in {path} cannot be read ({type(error).__name__}): {again}") from error
    if not isinstance(content, Mapping) or content.get("version") != VERSION:
        raise MachineFileError(f"The measurements in {path} are of another version of zerotop: {again}")
    figures = _parse(content)
    if figures is None:
        raise MachineFileError(f"The measurements in {path} are damaged: {again}")
    age_s = (time.time() if now_s is None else now_s) - figures.unix_s
    if figures.host != socket.gethostname():
        raise MachineFileError(f"The measurements in {path} are of {figures.host}: {again}")
    if age_s > _MOST_AGE_S:
        raise MachineFileError(f"The measurements in {path} are {age_s / 86400:,.0f} days old: {again}")
    return figures


def _parse(content: Mapping[str, Any]) -> MachineFigures | None:
    """Return the figures of a file; None if a field is missing or has another type, or a value is no measurement."""
    texts = [content.get(name) for name in ("host", "gpu", "torch")]
    values, reasons, unix_s = content.get("values"), content.get("reasons"), content.get("unix_s")
    if not all(isinstance(text, str) for text in texts) or not isinstance(values, dict) or not isinstance(reasons, dict):
        return None
    if not _is_number(unix_s) or not all(name in FIGURES and _is_number(value) for name, value in values.items()):
        return None
    if not all(isinstance(reason, str) for reason in reasons.values()):
        return None
    host, gpu, torch = map(str, texts)
    return MachineFigures(host, float(unix_s or 0), gpu, torch, values, reasons)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
