"""The keys that work on every screen, and sets of keys that several screens share."""

from __future__ import annotations

from textual.binding import BindingType

from zerotop.ui.base.bars.footer_keys import FooterEntry, bind, in_footer
from zerotop.ui.base.tabs import TABS

RECORDING_ACTIONS = frozenset(
    {
        "toggle_play",
        "steps",
        "seconds",
        "speed",
        "go_to",
        "finding",
        "feed",
        "begin",
        "follow",
        "restart_sampler",
        "enter",
        "job",
        "choose_rank",
        "switch",
        "switch_to",
    }
)
"""The app's actions that need an open recording."""


def list_bindings(
    screen: str, move_action: str, first_action: str, last_action: str, *, group: FooterEntry | None = None
) -> list[BindingType]:
    """Return the keys of a list or a long table. ``move_action`` takes a number of rows."""
    return [
        *scroll_bindings(screen, move_action, "page", extra_keys=(",k", ",j"), group=group),
        bind("home", first_action, f"{screen}.first", "First row", "Go to the first row"),
        bind("end", last_action, f"{screen}.last", "Last row", "Go to the last row"),
    ]


def scroll_bindings(
    prefix: str,
    line_action: str,
    page_action: str,
    *,
    up: int = -1,
    extra_keys: tuple[str, str] = ("", ""),
    group: FooterEntry | None = None,
) -> list[BindingType]:
    """Return the keys that scroll by lines and pages. Both actions take a number; ``up`` is its sign for going up."""
    return [
        bind(f"up{extra_keys[0]}", f"{line_action}({up})", f"{prefix}.up", "Scroll up", "One line up", group),
        bind(f"down{extra_keys[1]}", f"{line_action}({-up})", f"{prefix}.down", "Scroll down", "One line down", group),
        bind("pageup", f"{page_action}({up})", f"{prefix}.pageup", "Page up", "One page up"),
        bind("pagedown", f"{page_action}({-up})", f"{prefix}.pagedown", "Page down", "One page down"),
    ]


def rank_bindings(
    previous_id: str, next_id: str, *, action: str = "app.choose_rank", importance: int | None = None
) -> list[BindingType]:
    """Return the keys that choose a rank; without ``importance`` the footer does not show them."""
    group = None if importance is None else in_footer(importance, "rank", label_index=1)
    return [
        bind("up", f"{action}(-1)", previous_id, "Previous rank", "The rank above", group),
        bind("down", f"{action}(1)", next_id, "Next rank", "The rank below", group),
    ]


_STEP, _SECONDS = in_footer(6, "step"), in_footer(2, "10 s")
_SPEED, _FINDING = in_footer(5, "speed", label_index=1), in_footer(4, "next/prev")
_LEAVE = "Leave; while the job runs, asks what to do with it"
_END = "Go to the end, and follow it while the job runs"

APP_BINDINGS: list[BindingType] = [
    bind("q", "leave", "app.leave", "Leave", _LEAVE, 9),
    bind("ctrl+c,ctrl+q", "leave", "app.leave.always", "Leave", _LEAVE, priority=True),
    bind("space", "toggle_play", "time.play", "Pause", "Play or pause; a running job is not paused", 7),
    bind("left", "steps(-1)", "time.step.back", "Step back", "Go to the end of the previous step", _STEP),
    bind("right", "steps(1)", "time.step.on", "Step forward", "Go to the end of the next step", _STEP),
    bind("shift+left", "steps(-10)", "time.steps.back", "10 steps back", "Ten steps back"),
    bind("shift+right", "steps(10)", "time.steps.on", "10 steps forward", "Ten steps forward"),
    bind("h,comma", "seconds(-10)", "time.seconds.back", "10 s back", "Ten seconds back", _SECONDS),
    bind("l,full_stop", "seconds(10)", "time.seconds.on", "10 s forward", "Ten seconds forward", _SECONDS),
    bind("less_than_sign", "speed(-1)", "time.slower", "Slower", "Play slower, down to 0.25×", _SPEED),
    bind("greater_than_sign", "speed(1)", "time.faster", "Faster", "Play faster, up to 1000×", _SPEED),
    *(
        bind(str(number), f"switch_to({number})", f"app.screen.{number}", tab.title, "Show the screen with this number")
        for number, tab in enumerate(TABS, 1)
    ),
    bind("home", "begin", "time.begin", "Begin", "Go to the beginning of the recording"),
    bind("end", "follow", "time.end", "End", _END),
    bind("f", "follow", "time.follow", "Follow", _END, 8),
    bind("r", "restart_sampler", "job.sampler", "Restart sampler", "Start a new sampler on this node", 8),
    bind(
        "E",
        "enter",
        "job.enter",
        "Enter ranks",
        "Inject the probe into the ranks: phases, steps and PyTorch's memory from then on",
        8,
    ),
    bind("a", "feed", "app.feed", "Findings", "All findings, with evidence and advice", 7),
    bind("n", "finding(1)", "time.finding.on", "Next finding", "Go to the next finding", _FINDING),
    bind("p", "finding(-1)", "time.finding.back", "Previous finding", "Go to the previous finding", _FINDING),
    bind("g", "go_to", "time.go", "Go to", "Go to a step or a time: step 12, 1:30, end", 4),
    bind("i", "job", "job.info", "Info", "All facts about the job, and all messages in full", 3),
    bind("y", "copy", "app.copy", "Copy", "Copy the fix on Live, or the focused panel's numbers (tab moves the focus)", 2),
    bind("s", "screenshot", "app.screenshot", "Screenshot", "Save this screen as an SVG file in the current folder", 0),
    bind("t", "switch_theme", "app.theme", "Theme", "Switch between the dark and the light theme", 0),
    bind(
        "u", "switch_sizes", "app.sizes", "GiB or GB", "Switch sizes between binary (GiB, MiB) and decimal units (GB, MB)", 1
    ),
    bind(
        "U", "switch_pace", "app.pace", "s/it or it/s", "Switch between seconds per iteration and iterations per second", 0
    ),
    bind("question_mark", "help", "app.help", "Help", "Keys and terms of this screen", 8),
    bind("ctrl+p", "command_palette", "app.palette", "Palette", "Search for a command by name", 2, priority=True),
]
