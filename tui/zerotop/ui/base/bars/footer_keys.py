"""The footer's entries, taken from the bindings of a screen and of the app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from textual import keys
from textual.actions import parse
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen

from zerotop.ui.base.bars.footer import CursorState, Key
from zerotop.ui.drawing.units import other_pace, other_sizes


@dataclass(frozen=True)
class FooterEntry(Binding.Group):
    """Puts a binding in the footer; adjacent bindings with the same label share one entry."""

    importance: int = 0
    label_index: int = 0  # the binding of a pair that a click on the label runs


def in_footer(importance: int, label: str = "", *, label_index: int = 0) -> FooterEntry:
    """Return the group of a binding in the footer.

    Args:
        importance: where space is short, the entries with the lowest importance go first.
        label: by default the binding's description in lower case.
        label_index: which binding of a pair a click on the label runs.
    """
    return FooterEntry(label, importance=importance, label_index=label_index)


def bind(
    key: str,
    action: str,
    id: str,
    description: str,
    tooltip: str,
    footer: FooterEntry | int | None = None,
    *,
    priority: bool = False,
) -> Binding:
    """Return a binding with everything that help, palette and footer need. ``footer``: its entry or importance, if any."""
    group = in_footer(footer) if isinstance(footer, int) else footer
    return Binding(key, action, description, id=id, tooltip=tooltip, group=group, priority=priority)


def format_key(key: str) -> str:
    """Write a key as people do: ``←``, ``shift+←``, ``?``, ``^p``."""
    *modifiers, name = key.split("+")
    text = name if name == "enter" else keys.format_key(name)
    return f"^{text}" if modifiers == ["ctrl"] else "+".join((*modifiers, text))


@cache
def collect_keys(screen: type[DOMNode], app: type[DOMNode]) -> tuple[Key, ...]:
    """Return all entries a screen's footer can have: how to leave, the screen's own ones, then the app's."""
    own = _list_bindings(screen)
    action_by_key = {key: binding.action for binding in own for key in binding.key.split(",")}
    common = [one for one in _list_bindings(app) if action_by_key.get(_first_key(one), one.action) == one.action]
    first, *others = _make_entries(common, "app")
    return (first, *_make_entries(own, "screen"), *others)


def choose_keys(screen: Screen[Any], labels: Mapping[str, str]) -> tuple[Key, ...]:
    """Return the footer's entries at this moment.

    Args:
        screen: the screen; its ``check_action`` and the app's decide which keys work.
        labels: labels that depend on the moment, by the id of an entry's first binding; "" leaves the entry out.
    """
    labels = {"app.sizes": other_sizes().name, "app.pace": other_pace().value, **labels}
    entries = (replace(key, label=labels.get(key.id, key.label)) for key in collect_keys(type(screen), type(screen.app)))
    return tuple(key for key in entries if key.label and _is_enabled(screen, key.actions[0]))


def label_common_keys(moment: CursorState, finding_count: int) -> dict[str, str]:
    """Return the labels of the app's keys that depend on the moment."""
    playing = moment.is_playing or (moment.is_following and moment.is_live)
    findings = "1 finding" if finding_count == 1 else f"{finding_count} findings"
    labels = {"time.play": "pause" if playing else "play", "app.feed": findings}
    if moment.is_following:
        labels |= {"time.slower": "", "time.follow": ""}
    elif not moment.is_live:
        labels["time.follow"] = "end"
    return labels if finding_count else labels | {"app.feed": "", "time.finding.on": ""}


def _list_bindings(kind: type[DOMNode]) -> list[Binding]:
    """Return the bindings of a class, then those of its base classes."""
    declared = (binding for base in kind.__mro__ for binding in vars(base).get("BINDINGS", ()))
    return [binding for binding in declared if isinstance(binding, Binding)]


def _first_key(binding: Binding) -> str:
    return binding.key.split(",")[0]


def _make_entries(bindings: Sequence[Binding], namespace: str) -> list[Key]:
    shown = [(one.group, one) for one in bindings if isinstance(one.group, FooterEntry)]
    entries = []
    for _, pairs in groupby(shown, lambda pair: pair[0] if pair[0].description else pair[1].id):
        (group, first), *others = pairs
        members = [first, *(binding for _, binding in others)]
        actions = tuple(one.action if "." in one.action else f"{namespace}.{one.action}" for one in members)
        texts = tuple(format_key(_first_key(one)) for one in members)
        label = group.description or first.description.lower()
        entries.append(Key(first.id or "", texts, label, group.importance, actions, actions[group.label_index]))
    return entries


def _is_enabled(screen: Screen[Any], action: str) -> bool:
    namespace, name, parameters = parse(action)
    node: DOMNode = screen.app if namespace == "app" else screen
    return bool(node.check_action(name, parameters))
