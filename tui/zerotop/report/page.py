"""A whole page: head, styles from the program's themes, scripts, and a policy that forbids any request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from zerotop import find_version
from zerotop.analysis.reports.verdict import Verdict
from zerotop.report.elements import Content, Element, clean_values, element, write_html
from zerotop.ui.drawing.theme import DARK, LIGHT

# Nothing is fetched, whatever a recording makes of the page; styles and scripts are those below.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(title: str, content: Iterable[Content], charts: dict[str, Any] | None = None) -> str:
    """Return a page. ``charts``: the input of report.js, as JSON values."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"zerotop {find_version()}"),
        element("title", title),
        element("style", _read_asset("uPlot.min.css") + _write_palettes() + _read_asset("report.css")),
    )
    scripts = []
    if charts is not None:
        # A script element ends at the first "</": that must not come from the data.
        data = json.dumps(clean_values(charts), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        scripts = [
            element("script", data, type="application/json", id="charts-data"),
            element("script", _read_asset("uPlot.iife.min.js")),
            element("script", _read_asset("report.js")),
        ]
    return write_html(element("html", head, element("body", element("main", content), scripts), lang="en"))


def build_header(kind: str, name: str, verdict: Verdict, setup: str) -> Element:
    """Return the top of a page: the ``kind`` of report, its subject, the verdict, and a line about the set-up."""
    return element(
        "header",
        element("p", element("b", "zerotop"), f" {kind}", class_="brand"),
        element("h1", name),
        element(
            "div",
            element("p", verdict.headline, class_="headline"),
            (element("p", sentence) for sentence in verdict.sentences),
            class_=f"verdict {verdict.outcome.value}",
            id="verdict",
        ),
        element("p", setup, class_="muted setup"),
    )


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _write_palettes() -> str:
    """Return the colours of both themes as CSS variables."""
    light, dark = (_list_colours(theme) for theme in (LIGHT, DARK))
    return (
        f":root{{{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _list_colours(theme: Any) -> str:
    names = ("primary", "foreground", "background", "surface", "panel", "success", "warning", "error")
    colours = {name: getattr(theme, name) for name in names}
    colours |= {name: value for name, value in theme.variables.items() if value.startswith("#")}
    return "".join(f"--{name}:{value};" for name, value in colours.items())
