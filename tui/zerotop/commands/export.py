"""``zerotop export``: a recording's tables as CSV, Parquet or JSON lines, or all of it as a trace."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from zerotop.analysis.formatting import format_count
from zerotop.analysis.reports.export import export_table
from zerotop.analysis.reports.export_tables import TABLES
from zerotop.analysis.views.notices import describe_missing_steps
from zerotop.commands.common.errors import USAGE, Problem, suggest_name
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.new_files import choose_file
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.publishing.companion import check_protocol
from zerotop.recording.atomic_write import write_atomically
from zerotop.recording.reader import Recording

_FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".pftrace": "perfetto"}


def export(options: argparse.Namespace) -> int:
    """Write to standard output, a file, or (all tables) a directory. Return 0."""
    form = options.format or _FORMATS.get(Path(options.output or "").suffix.lower(), "csv")
    if form == "perfetto":
        return _export_trace(options)
    if form == "otlp":
        return _send_trace(options)
    table = options.table or "steps"
    if table != "all" and table not in TABLES:
        raise Problem(
            f"Unknown table {table!r}. Choose one of: {', '.join(TABLES)}, or all{suggest_name(table, TABLES)}", USAGE
        )
    to_stdout = options.output in (None, "-")
    if to_stdout and table == "all":
        raise Problem("--table all needs a directory: -o DIRECTORY", USAGE)
    if to_stdout and form == "parquet" and sys.stdout.isatty():
        raise Problem("Parquet is binary and cannot be shown in a terminal: name a file with -o FILE", USAGE)
    with open_named(options.recording) as recording:
        if missing := describe_missing_steps(recording):
            write_messages(missing)
        if to_stdout:
            export_table(recording, table, form, _TerminalStream() if sys.stdout.isatty() else sys.stdout.buffer)
            sys.stdout.flush()
        else:
            _write_files(recording, table, form, Path(options.output), options.force)
    return 0


def _export_trace(options: argparse.Namespace) -> int:
    if options.table is not None:
        raise Problem("--table does not go with --format perfetto: a trace has everything", USAGE)
    to_stdout = options.output in (None, "-")
    if to_stdout and sys.stdout.isatty():
        raise Problem("A trace is binary and cannot be shown in a terminal: name a file with -o FILE", USAGE)
    try:
        from zerotop.analysis.trace.perfetto import write_trace
    except ImportError:
        raise Problem("Traces need the package perfetto: pip install 'zerotop[perfetto]'") from None
    with open_named(options.recording) as recording:
        if to_stdout:
            write_trace(recording, sys.stdout.buffer)
            sys.stdout.flush()
            return 0
        path = Path(options.output)
        path = path / f"{recording.name}.pftrace" if path.is_dir() else path
        packets = _write_path(choose_file(path, options.force), lambda stream: write_trace(recording, stream))
        print(escape_unprintable(f"{path}: {format_count(packets, 'packet')}. Open it on ui.perfetto.dev"), file=sys.stderr)
    return 0


def _send_trace(options: argparse.Namespace) -> int:
    if options.table is not None or options.output is not None:
        raise Problem("--format otlp goes to a collector, whole: neither --table nor -o goes with it", USAGE)
    check_protocol()
    try:
        from zerotop.commands.publishing.otlp_recording import send_recording
    except ImportError:
        raise Problem("--format otlp needs the SDK of OpenTelemetry: pip install 'zerotop[otlp]'") from None
    with open_named(options.recording) as recording:
        spans, findings = send_recording(recording)
        print(
            escape_unprintable(
                f"{recording.name}: {format_count(spans, 'span')} and {format_count(findings, 'log record')} sent"
            ),
            file=sys.stderr,
        )
    return 0


class _TerminalStream:
    """Writes encoded text to a terminal with visible escapes, since a terminal obeys control sequences in names."""

    def write(self, data: memoryview, /) -> int:
        """Write whole lines; return the number of bytes."""
        binary = bytes(data)
        sys.stdout.write("\n".join(map(escape_unprintable, binary.decode(errors="replace").split("\n"))))
        return len(binary)


def _write_files(recording: Recording, table: str, form: str, output: Path, force: bool) -> None:
    if table != "all" and not output.is_dir():
        choose_file(output, force)
        _report_file(output, write_file(recording, table, form, output))
        return
    output.mkdir(parents=True, exist_ok=True)
    paths = {name: output / f"{name}.{form}" for name in (TABLES if table == "all" else (table,))}
    for path in paths.values():
        choose_file(path, force)
    for name, path in paths.items():
        _report_file(path, write_file(recording, name, form, path))


def _report_file(path: Path, rows: int) -> None:
    if path.is_file():
        print(escape_unprintable(f"{path}: {format_count(rows, 'row')}"), file=sys.stderr)


def write_file(recording: Recording, table: str, form: str, path: Path) -> int:
    """Write one table and return the number of rows. Raises OSError."""
    return _write_path(path, lambda stream: export_table(recording, table, form, stream))


def _write_path(path: Path, write: Callable[[IO[bytes]], int]) -> int:
    """Write a file completely or not at all; a device or a pipe as it comes. Return what ``write`` returns."""
    if path.exists() and not path.is_file():  # /dev/null or a named pipe
        with path.open("wb") as stream:
            return write(stream)
    with write_atomically(path) as partial, partial.open("xb", io.DEFAULT_BUFFER_SIZE * 16) as stream:
        return write(stream)
