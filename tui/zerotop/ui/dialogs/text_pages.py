"""The pages to read: help, and everything known about the job."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.binding import Binding

from zerotop.analysis.live_view import LiveView
from zerotop.ui.drawing import labels
from zerotop.ui.drawing.formatting import amount
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import literal
from zerotop.ui.drawing.units import giga

_INDENT, _INDENT_MORE = (0, 0, 0, 2), (0, 0, 1, 4)
_KEY_WORDS = {
    "question_mark": "?",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "comma": ",",
    "full_stop": ".",
    "minus": "-",
    "equals_sign": "=",
    "plus": "+",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "slash": "/",
}
# What bindings are called by that work on every screen.
_EVERYWHERE = ("app.", "time.", "job.")


def key_text(key: str) -> str:
    """How a key is written: ``shift+left``, ``?``, ``ctrl+c``."""
    return " ".join(_KEY_WORDS.get(part, part) for part in key.split(","))


def help_page(about: str, bindings: Iterable[Binding], terms: Iterable[tuple[str, str]], glyphs: Glyphs) -> Group:
    """What the screen is about, its own keys, its words, then the keys that work everywhere."""
    known = list(bindings)
    here = [binding for binding in known if not (binding.id or "").startswith(_EVERYWHERE)]
    everywhere = [binding for binding in known if binding not in here]
    parts: list[RenderableType] = [Text(f"{glyphs.plain(about)}\n")]
    if here:
        parts += [_heading("Keys of this screen"), _keys_table(here, glyphs), Text()]
    parts.append(_heading("Words of this screen"))
    for term, meaning in terms:
        parts.append(Padding(Text(glyphs.plain(term), "bold"), _INDENT))
        parts.append(Padding(Text(glyphs.plain(meaning.replace("\n", " "))), _INDENT_MORE))
    parts += [_heading("Keys everywhere"), _keys_table(everywhere, glyphs)]
    return Group(*parts)


def _keys_table(bindings: Iterable[Binding], glyphs: Glyphs) -> Padding:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for names, meaning in _keys(bindings):
        table.add_row(Text("  ".join(names)), Text(glyphs.plain(meaning)))
    return Padding(table, _INDENT)


def _heading(text: str) -> Text:
    return Text(f"{text}\n", "bold")


def _keys(bindings: Iterable[Binding]) -> list[tuple[list[str], str]]:
    """(keys, what they do), a row for each action; numbers that do alike share one."""
    rows: dict[str, tuple[list[str], Binding]] = {}
    for binding in bindings:
        action = binding.tooltip if binding.key.isdigit() else binding.action
        rows.setdefault(action, ([], binding))[0].append(key_text(binding.key))
    return [(_together(keys), binding.tooltip or binding.description) for keys, binding in rows.values()]


def _together(keys: list[str]) -> list[str]:
    return [f"{keys[0]} to {keys[-1]}"] if keys[0].isdigit() and len(keys) > 1 else keys


def job_text(view: LiveView, glyphs: Glyphs) -> Group:
    """What is known about the job, its engine and its hosts, and every notice in full."""
    job = view.job
    known = Table.grid(padding=(0, 2))
    known.add_column(no_wrap=True, style="bold")
    known.add_column()
    for label, value in (
        ("name", job.name),
        ("command", shlex.join(job.command)),
        ("launcher", job.launcher),
        ("state", f"{job.state.value}" + ("" if job.exit_code is None else f", exit code {job.exit_code}")),
        ("model", labels.model(job)),
        ("stage", labels.stage(job)),
        ("offload", labels.offload(job, glyphs) or ("none" if job.zero_stage is not None else "")),
        ("dtype", job.dtype or ""),
        ("batch", _batch(view)),
        ("hosts", "\n".join(_host(host.name, host.cores, host.memory_limit_bytes) for host in view.hosts)),
    ):
        if value:
            known.add_row(label, Text(literal_lines(value, glyphs)))
    said = (Text("\n" + literal_lines(sentence, glyphs)) for sentence in (job.exit_text, *job.notices) if sentence)
    return Group(known, *said)


def _batch(view: LiveView) -> str:
    job = view.job
    parts = (
        ("micro-batch", job.micro_batch),
        ("accumulation", job.gradient_accumulation),
        ("ranks", job.ranks),
    )
    return ", ".join(f"{name} {number}" for name, number in parts if number is not None)


def _host(name: str, cores: int, memory: int) -> str:
    return f"{name}: {cores} cores, {amount(memory).strip()} {giga().name}"


def literal_lines(text: str, glyphs: Glyphs) -> str:
    """Safe text that may have several lines."""
    return "\n".join(literal(line, glyphs) for line in text.split("\n"))
