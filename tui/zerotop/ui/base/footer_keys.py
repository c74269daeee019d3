"""Which keys the bottom row names at a moment: those that someone would want now."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.ui.base.footer import CursorState, Key
from zerotop.ui.base.interfaces import Controller
from zerotop.ui.drawing.units import other_pace, other_sizes


def insert_keys(common: tuple[Key, ...], own: Sequence[Key]) -> tuple[Key, ...]:
    """The bottom row's entries with a screen's own ones, which stand after how to leave."""
    return (*common[:1], *own, *common[1:])


def choose_keys(
    moment: CursorState,
    controller: Controller | None,
    sampler_missing: bool,
    findings: int = 0,
    *,
    can_enter: bool = False,
) -> tuple[Key, ...]:
    """The bottom row's entries, in drawing order. ``findings``: how many there are to go to."""
    playing = moment.is_playing or (moment.is_following and moment.is_live)
    keys = [
        Key("q", "leave", "app.leave", 9),
        Key("space", "pause" if playing else "play", "app.toggle_play", 7),
        Key("←→", "step", "app.steps(-1)", 6, ("app.steps(-1)", "app.steps(1)")),
        Key(",.", "10 s", "app.seconds(-10)", 2, ("app.seconds(-10)", "app.seconds(10)")),
    ]
    if not moment.is_following:
        keys.append(Key("<>", "speed", "app.speed(1)", 5, ("app.speed(-1)", "app.speed(1)")))
        keys.append(Key("f", "follow" if moment.is_live else "end", "app.follow", 8))
    if sampler_missing and controller is not None:
        keys.append(Key("r", "restart sampler", "app.restart_sampler", 8))
    if can_enter:
        keys.append(Key("E", "enter ranks", "app.enter", 8))
    if findings:
        keys.append(Key("a", f"{findings} found", "app.feed", 7))
        keys.append(Key("np", "go there", "app.finding(1)", 4, ("app.finding(1)", "app.finding(-1)")))
    keys += [
        Key("g", "go to", "app.go_to", 4),
        Key("i", "info", "app.job", 3),
        Key("s", "screenshot", "app.screenshot", 1),
        Key("t", "theme", "app.switch_theme", 0),
        Key("u", other_sizes().name, "app.switch_sizes", 1),
        Key("U", other_pace().value, "app.switch_pace", 0),
        Key("?", "help", "app.help", 8),
        Key("^p", "palette", "app.command_palette", 2),
    ]
    return tuple(keys)
