"""HTML from elements: texts and attributes are escaped when the page is written, since names and output are anybody's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
Content = Element | str | None

# Characters that HTML forbids, among them the terminal's escape character.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# Those that change the order in which a reader sees the others.
_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def element(tag: str, *children: Content | Iterable[Content], **attributes: str) -> Element:
    """Return an element with texts and elements in it; None is left out. ``class_`` and ``data_x`` name attributes."""
    names = {name.rstrip("_").replace("_", "-"): clean_text(value) for name, value in attributes.items()}
    parent = Element(tag, names)
    for child in children:
        for item in (child,) if child is None or isinstance(child, (str, Element)) else child:
            _append(parent, item)
    return parent


def _append(parent: Element, child: Content) -> None:
    if isinstance(child, Element):
        parent.append(child)
    elif child is not None:
        last = parent[-1] if len(parent) else None
        if last is None:
            parent.text = (parent.text or "") + clean_text(child)
        else:
            last.tail = (last.tail or "") + clean_text(child)


def clean_text(text: str) -> str:
    """Replace characters that HTML forbids, and write those that reorder text as visible escapes."""
    return _REORDERING.sub(lambda match: f"\\u{ord(match[0]):04x}", _FORBIDDEN.sub("\ufffd", text))


def clean_values(value: Any) -> Any:
    """Return JSON values with :func:`clean_text` applied to each text."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(name): clean_values(inner) for name, inner in value.items()}
    return [clean_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def table(head: Iterable[Content], rows: Iterable[Element], **attributes: str) -> Element:
    """Return a table that scrolls sideways where it does not fit. A cell of ``head`` may be a ``th`` itself."""
    cells = (cell if isinstance(cell, Element) and cell.tag == "th" else element("th", cell, scope="col") for cell in head)
    header = element("thead", element("tr", cells))
    return element("div", element("table", header, element("tbody", rows), **attributes), class_="scroll")


def write_html(root: Element) -> str:
    """Return the page, with its document type. Scripts and styles are written as they are: they must be our own."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
