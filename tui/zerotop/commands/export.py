"""``zerotop export``: a recording's tables as CSV, Parquet or JSON lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zerotop.analysis.reports.export import TABLES
from zerotop.analysis.reports.export import export_table as write_table
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named
from zerotop.session.atomic_write import write_atomically
from zerotop.session.reader import Session


def export(options: argparse.Namespace) -> int:
    """Writes to standard output, a file, or (all tables) a directory. Returns 0."""
    table, form = options.table, options.format
    if table != "all" and table not in TABLES:
        raise Problem(f"There is no table {table!r}; there are: {', '.join(TABLES)}, and all", USAGE)
    to_stdout = options.output in (None, "-")
    if to_stdout and table == "all":
        raise Problem("All tables need a directory to be written to: -o DIRECTORY", USAGE)
    if to_stdout and form == "parquet" and sys.stdout.isatty():
        raise Problem("Parquet is not for a terminal: name a file with -o FILE", USAGE)
    session = open_named(options.session)
    if to_stdout:
        write_table(session, table, form, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return 0
    output = Path(options.output)
    if table != "all" and not output.is_dir():
        _report_file(output, write_file(session, table, form, output))
        return 0
    output.mkdir(parents=True, exist_ok=True)
    for name in TABLES if table == "all" else (table,):
        path = output / f"{name}.{form}"
        _report_file(path, write_file(session, name, form, path))
    return 0


def _report_file(path: Path, rows: int) -> None:
    if path.is_file():
        print(escape_unprintable(f"{path}: {rows} rows"), file=sys.stderr)


def write_file(session: Session, table: str, form: str, path: Path) -> int:
    """Writes one table; returns how many rows it has. Raises OSError."""
    if path.exists() and not path.is_file():  # /dev/null, a named pipe
        with path.open("wb") as stream:
            return write_table(session, table, form, stream)
    with write_atomically(path) as partial, partial.open("xb") as stream:
        return write_table(session, table, form, stream)
