"""The app of the demo: a row that says what to look at next, and the recorded story one key away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual.binding import BindingType

from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import LiveView
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.start_interfaces import OpenedRecording

_STORY = "R plays a recorded fine-tune of 8 B parameters on four GPUs"
_STARTING = f"PyTorch and DeepSpeed are starting, about 15 seconds. Meanwhile {_STORY}."
_HEALTHY = "Soon the script will prepare its data slowly, on purpose: watch the iterations."
_FOUND = "The planted fault. Next: 3 shows where, a the fix, and y there copies it."
_NO_FAULT = f"No fault is planted this time: data take no time. {_STORY}."
_FAILED = f"The training failed. Instead, {_STORY}."
_PLAYING = "Next: n goes to the next finding, 3 shows where the time goes, 4 the memory, a all findings. q leaves."


class Guide:
    """Tips for the training with the planted fault.

    Args:
        is_fixed: the fault is not planted.
    """

    def __init__(self, *, is_fixed: bool) -> None:
        self._is_fixed = is_fixed

    def __call__(self, view: LiveView, findings: tuple[Finding, ...]) -> str:
        """Return a sentence."""
        if any(finding.name == "data_stall" for finding in findings):
            return _FOUND
        if view.job.state.is_over and view.job.exit_code != 0:
            return _FAILED
        if view.progress.step is None:
            return _STARTING
        return _NO_FAULT if self._is_fixed else _HEALTHY


class DemoApp(ZerotopApp):
    """Shows the demo's job or its recording.

    Args:
        guide: says what to look at next.
        options: see :class:`Monitor`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [bind("R", "story", "demo.story", "Recorded story", _STORY, 8)]

    def __init__(self, *shown: Any, guide: Callable[[LiveView, tuple[Finding, ...]], str], **options: Any) -> None:
        self._guide = guide
        super().__init__(*shown, **options)

    def set_recording(self, opened: OpenedRecording) -> None:
        super().set_recording(opened)
        self.viewer.builder.guide = self._guide

    def action_story(self) -> None:
        """Leave the running job for the recording."""
        self.exit(Leaving.FOR_STORY)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "story":
            return self.viewer.controller is not None
        return super().check_action(action, parameters)


def guide_story(note: str) -> Callable[[LiveView, tuple[Finding, ...]], str]:
    """Return the guide of the recording; ``note`` comes first."""
    return lambda view, findings: f"{note} {_PLAYING}".strip()
