"""The text pages: help, and all facts about the job."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.binding import Binding

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Job, LiveView
from zerotop.recording.moments.process_exits import describe_exit_code
from zerotop.ui.base.bars.footer_keys import format_key
from zerotop.ui.drawing import labels
from zerotop.ui.drawing.formatting import format_giga
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.drawing.units import giga_unit

_INDENT, _INDENT_MORE = (0, 0, 0, 2), (0, 0, 1, 4)
# Prefixes of the ids of bindings that work on every screen.
_GLOBAL_PREFIXES = ("app.", "time.", "job.")


def build_help(about: str, bindings: Iterable[Binding], terms: Iterable[tuple[str, str]], glyphs: Glyphs) -> Group:
    """Build a screen's help: its description, its keys and terms, then the keys that work everywhere."""
    listed = list(bindings)
    own = [binding for binding in listed if not (binding.id or "").startswith(_GLOBAL_PREFIXES)]
    common = [binding for binding in listed if binding not in own]
    parts: list[RenderableType] = [Text(f"{glyphs.to_plain(about)}\n")]
    if own:
        parts += [_make_heading("Keys on this screen"), _build_keys_table(own, glyphs), Text()]
    parts += [_make_heading("Terms on this screen")] if terms else []
    for term, meaning in terms:
        parts.append(Padding(Text(glyphs.to_plain(term), "bold"), _INDENT))
        parts.append(Padding(Text(glyphs.to_plain(meaning.replace("\n", " "))), _INDENT_MORE))
    return Group(*parts, _make_heading("Keys everywhere"), _build_keys_table(common, glyphs))


def _build_keys_table(bindings: Iterable[Binding], glyphs: Glyphs) -> Padding:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for names, meaning in _group_bindings(bindings):
        table.add_row(Text(glyphs.to_plain("  ".join(names))), Text(glyphs.to_plain(meaning)))
    return Padding(table, _INDENT)


def _make_heading(text: str) -> Text:
    return Text(f"{text}\n", "bold")


def _group_bindings(bindings: Iterable[Binding]) -> list[tuple[list[str], str]]:
    """Return (keys, description) for each action; numbers share a row."""
    rows: dict[str, tuple[list[str], Binding]] = {}
    for binding in bindings:
        action = binding.tooltip if binding.key.isdigit() else binding.action
        rows.setdefault(action, ([], binding))[0].append(format_key(binding.key))
    return [(_join_digits(keys), binding.tooltip or binding.description) for keys, binding in rows.values()]


def _join_digits(keys: list[str]) -> list[str]:
    return [f"{keys[0]} to {keys[-1]}"] if keys[0].isdigit() and len(keys) > 1 else keys


def build_job_page(view: LiveView, glyphs: Glyphs) -> Group:
    """Build a page about the job, its engine and its hosts, with all notices in full."""
    job, engine = view.job, view.job.engine
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column()
    for label, value in (
        ("name", job.name),
        ("command", shlex.join(job.command)),
        ("launcher", job.launcher),
        ("state", _describe_state(job)),
        ("model", labels.format_model(engine)),
        (
            "optimizer" if engine.is_loop and not engine.parallelism else "training" if engine.is_loop else "stage",
            engine.method_text,
        ),
        ("library", engine.library),
        ("offload", labels.format_offload(engine, glyphs) or ("none" if engine.zero_stage is not None else "")),
        ("dtype", engine.precision_text),
        ("batch", _format_batch(view)),
        ("hosts", "\n".join(_format_host(host.name, host.cores, host.memory_limit_bytes) for host in view.hosts)),
    ):
        if value:
            facts.add_row(label, Text(sanitize_lines(value, glyphs)))
    notices = (Text("\n" + sanitize_lines(sentence, glyphs)) for sentence in (job.exit_text, *job.notices) if sentence)
    return Group(facts, *notices)


def _describe_state(job: Job) -> str:
    if job.exit_code is None:
        return job.state.value
    return f"{job.state.value}, {describe_exit_code(job.exit_code, job.exit_signal)}"


def _format_batch(view: LiveView) -> str:
    engine = view.job.engine
    parts = (
        ("micro-batch", engine.micro_batch),
        ("accumulation", engine.gradient_accumulation),
        ("ranks", engine.ranks),
        ("data-parallel groups", engine.batch_ranks if engine.batch_ranks != engine.ranks else None),
        ("stages", engine.stages),
    )
    batch = ", ".join(f"{name} {number}" for name, number in parts if number is not None)
    return batch if engine.batch_step is None else f"{batch}, from step {engine.batch_step} on"


def _format_host(name: str, cores: int, memory: int) -> str:
    return f"{name}: {format_count(cores, 'core')}, {format_giga(memory).strip()} {giga_unit().name}"


def sanitize_lines(text: str, glyphs: Glyphs) -> str:
    """Sanitize text that may have several lines."""
    return "\n".join(sanitize(line, glyphs) for line in text.split("\n"))
