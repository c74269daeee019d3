"""The keys that work on every screen of the program; those of one screen are declared there."""

from __future__ import annotations

from textual.binding import Binding, BindingType

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
"""The actions of the app that need a recording to be open."""


def list_bindings(screen: str, move_action: str, first_action: str, last_action: str) -> list[BindingType]:
    """The keys of a list or a long table. ``moved``: the action for so many rows; ``first``, ``last``: to its ends."""
    return [
        Binding("up,k", f"{move_action}(-1)", "Up", id=f"{screen}.up", tooltip="One row up", show=False),
        Binding("down,j", f"{move_action}(1)", "Down", id=f"{screen}.down", tooltip="One row down", show=False),
        Binding("pageup", "page(-1)", "Page up", id=f"{screen}.pageup", tooltip="A page up", show=False),
        Binding("pagedown", "page(1)", "Page down", id=f"{screen}.pagedown", tooltip="A page down", show=False),
        Binding("home", first_action, "First", id=f"{screen}.first", tooltip="To the first row", show=False),
        Binding("end", last_action, "Last", id=f"{screen}.last", tooltip="To the last row", show=False),
    ]


APP_BINDINGS: list[BindingType] = [
    Binding(
        "space",
        "toggle_play",
        "Pause",
        id="time.play",
        tooltip="Play or pause; pausing a live job only holds the picture",
    ),
    Binding("left", "steps(-1)", "Step back", id="time.step.back", tooltip="To the end of the step before"),
    Binding("right", "steps(1)", "Step on", id="time.step.on", tooltip="To the end of the next step"),
    Binding("shift+left", "steps(-10)", "10 steps back", id="time.steps.back", tooltip="Ten steps back"),
    Binding("shift+right", "steps(10)", "10 steps on", id="time.steps.on", tooltip="Ten steps on"),
    Binding("comma", "seconds(-10)", "10 s back", id="time.seconds.back", tooltip="Ten seconds back"),
    Binding("full_stop", "seconds(10)", "10 s on", id="time.seconds.on", tooltip="Ten seconds on"),
    Binding(
        "less_than_sign,minus",
        "speed(-1)",
        "Slower",
        id="time.slower",
        tooltip="Play more slowly, down to 0.25×",
    ),
    Binding(
        "greater_than_sign,equals_sign,plus",
        "speed(1)",
        "Faster",
        id="time.faster",
        tooltip="Play faster, up to 1000×",
    ),
    *(
        Binding(
            str(number),
            f"switch_to({number})",
            f"Screen {number}",
            id=f"app.screen.{number}",
            tooltip="To the screen of this number",
            show=False,
        )
        for number in range(1, len(TABS) + 1)
    ),
    Binding("g", "go_to", "Go to", id="time.go", tooltip="Go to a step or a time"),
    Binding("n", "finding(1)", "Next finding", id="time.finding.on", tooltip="To the next finding"),
    Binding("p", "finding(-1)", "Finding before", id="time.finding.back", tooltip="To the finding before"),
    Binding("a", "feed", "Findings", id="app.feed", tooltip="All findings, with their numbers and what to do"),
    Binding("home", "begin", "Begin", id="time.begin", tooltip="To the recording's begin"),
    Binding("end", "follow", "End", id="time.end", tooltip="To the end; while the job runs, along with it"),
    Binding("f", "follow", "Follow", id="time.follow", tooltip="To the end; while the job runs, along with it"),
    Binding(
        "r",
        "restart_sampler",
        "Restart sampler",
        id="job.sampler",
        tooltip="Start another sampler on this node",
    ),
    Binding(
        "E",
        "enter",
        "Enter ranks",
        id="job.enter",
        tooltip="Put the probe into the ranks: phases, steps and PyTorch's memory from then on",
    ),
    Binding(
        "i",
        "job",
        "Info",
        id="job.info",
        tooltip="Everything known about the job, and every message in full",
    ),
    Binding(
        "s",
        "screenshot",
        "Screenshot",
        id="app.screenshot",
        tooltip="Save this screen as SVG in the current folder",
    ),
    Binding("y", "copy", "Copy", id="app.copy", tooltip="Copy the numbers of the focused panel (tab moves)"),
    Binding(
        "t",
        "switch_theme",
        "Dark or light",
        id="app.theme",
        tooltip="Switch between the dark and the light theme",
    ),
    Binding(
        "u",
        "switch_sizes",
        "GiB or GB",
        id="app.sizes",
        tooltip="Tell sizes in binary units (GiB, MiB) or in decimal ones (GB, MB)",
    ),
    Binding(
        "U",
        "switch_pace",
        "s/it or it/s",
        id="app.pace",
        tooltip="Tell the pace in seconds an iteration or in iterations a second",
    ),
    Binding("question_mark", "help", "Help", id="app.help", tooltip="Keys, and the words of this screen"),
    Binding(
        "q",
        "leave",
        "Leave",
        id="app.leave",
        tooltip="Leave; while the job runs, asks what becomes of it",
    ),
    Binding(
        "ctrl+c,ctrl+q",
        "leave",
        "Leave",
        id="app.leave.always",
        tooltip="Leave; while the job runs, asks what becomes of it",
        show=False,
        priority=True,
    ),
]
