"""The lines of the job's own code that changed the training: noted where they call PyTorch, else found by their names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

from zerotop_probe.inside.changes.checkpoint_calls import CHECKPOINTING, CheckpointCalls
from zerotop_probe.inside.changes.training_settings import Change
from zerotop_probe.inside.changes.unoptimized_parameters import RegisteredParameters, UnoptimizedParameters
from zerotop_probe.inside.guard import CostMeter, now, wrap_method
from zerotop_probe.inside.stacks import code_positions
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.event_values import NO_SYNC, OBJECTS, UNOPTIMIZED

# What a call of a method of Module changes, by the method. Such calls are rare once the training has begun.
_METHODS = {
    "_apply": ("dtypes", "devices"),
    "requires_grad_": ("trained_parameters",),
    "register_forward_hook": ("hooks",),
    "register_forward_pre_hook": ("hooks",),
    "register_full_backward_hook": ("hooks",),
    "register_full_backward_pre_hook": ("hooks",),
}
# The names in code that sets what has no such method: of attributes and keys that are set, and of functions.
_NAMES = {
    "trained_parameters": ("requires_grad", "requires_grad_()"),
    "autocast": ("autocast()",),
    "other_autocast": ("autocast()",),
    NO_SYNC: ("no_sync()",),
    "cudnn.enabled": ("enabled",),
    "cudnn.benchmark": ("benchmark",),
    "cudnn.deterministic": ("deterministic",),
    "matmul_precision": ("set_float32_matmul_precision()", "allow_tf32", "fp32_precision"),
    "deterministic_algorithms": ("use_deterministic_algorithms()",),
    "anomaly_mode": ("set_detect_anomaly()", "detect_anomaly()"),
    "flash_attention": ("enable_flash_sdp()", "sdpa_kernel()"),
    "efficient_attention": ("enable_mem_efficient_sdp()", "sdpa_kernel()"),
    "threads": ("set_num_threads()",),
    "compiled": ("compile()",),
    "attention": ("set_attn_implementation()", "_attn_implementation"),
    "module.training": ("train()", "eval()"),
    "module.gradient_checkpointing": (
        "gradient_checkpointing",
        "gradient_checkpointing_enable()",
        "gradient_checkpointing_disable()",
    ),
    "parameter_hooks": ("register_hook()", "register_post_accumulate_grad_hook()"),
}
_OPTIMIZER, _MODULE = "optimizer.", "module."
# Settings that have a number or a name: the types of constants that code gives them.
_VALUES: dict[str, tuple[type, ...]] = {"matmul_precision": (bool, str), "threads": (int,)}
# What PyTorch's newer settings call a precision, and what `allow_tf32` says about it.
_PRECISIONS = {"highest": "ieee", "high": "tf32", "medium": "bf16", True: "tf32", False: "ieee"}
_OPPOSITES = {"gradient_checkpointing_disable": False, "eval": False}


class SettingLines:
    """Notes the lines that call PyTorch's methods while a job trains."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter
        self._own_lines = OwnLines()
        self._noted: dict[str, tuple[int, OwnPlace | None]] = {}  # time and line of a call, by setting
        self._makers: list[OwnPlace] = []  # the line that made an optimizer last, and its caller
        self._called_ns: dict[str, int] = {}  # when the last call was noted
        self._fresh: set[str] = set()  # settings of calls since the last look
        self._registered = RegisteredParameters(self._own_lines)
        self.unoptimized = UnoptimizedParameters(self._registered)
        self.checkpoints = CheckpointCalls(lambda: self.note(now(), (CHECKPOINTING,)), meter)
        self.is_on = False
        """Whether the training has begun, and lines may be named."""

    @property
    def has_noted(self) -> bool:
        """Whether a method was called since the last look."""
        return bool(self._fresh)

    def begin_look(self) -> None:
        """Note calls from now on as those after a look."""
        self._fresh.clear()

    def install_hooks(self) -> None:
        """Wrap the methods of PyTorch's modules. Without effect before PyTorch is loaded."""
        owner = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
        for method, names in _METHODS.items() if owner is not None else ():
            wrap_method(owner, method, self._make_note(names), _do_nothing, self._meter)
        if owner is not None:
            wrap_method(owner, "register_parameter", self._note_parameter, _do_nothing, self._meter)
        self.checkpoints.install_hooks()

    def _note_parameter(self, time_ns: int, module: Any, args: Any, kwargs: Any) -> None:
        if self.is_on:
            self._registered.note(time_ns, args[1] if len(args) > 1 else kwargs.get("param"))

    def _make_note(self, names: tuple[str, ...]) -> Callable[..., None]:
        def note(time_ns: int, module: Any, args: Any, kwargs: Any) -> None:
            # Calls for the modules within follow at once: the line is that of the first.
            if self.is_on and time_ns - self._called_ns.get(names[0], 0) > 1_000_000:
                self.note(time_ns, names)

        return note

    def note(self, time_ns: int, names: tuple[str, ...]) -> None:
        """Note the line of the job's own code beneath which these settings may change now.

        Of a line that runs in each step, the first call since the last look counts.
        """
        places = list(islice(self._own_lines.list_places(sys._getframe()), 2)) if self.is_on else []
        place = places[0] if places else None
        if OBJECTS in names and place is not None:
            self._makers = places
        for name in names if place is not None else ():
            self._called_ns[name] = time_ns
            if name not in self._fresh or self._noted.get(name, (0, None))[1] != place:
                self._noted[name] = time_ns, place
        self._fresh.update(names)

    def end_step(self) -> None:
        """Note that gradient checkpointing was switched off by a step that did not call it; no line did that."""
        changed_ns = self.checkpoints.end_step()
        if changed_ns is not None:
            self._fresh.add(CHECKPOINTING)
            if self.checkpoints.is_on is False:
                self._noted[CHECKPOINTING] = changed_ns, None

    def find_place(self, change: Change, since_ns: int, frame: FrameType | None) -> tuple[int | None, OwnPlace | None]:
        """Return when a setting changed, if that is known, and the line; ``since_ns``: the last look."""
        name = change.name
        if name == UNOPTIMIZED:
            return self._find_loss() if change.after else (None, None)
        noted = self._noted.get("optimizers" if name.startswith(_OPTIMIZER) else name)
        if noted is not None and (noted[0] >= since_ns or name == CHECKPOINTING):
            return (noted[0], self._find_caller(noted[1], frame)) if name == OBJECTS else noted
        wanted = _NAMES.get(name) or ((name.partition(".")[2],) if name.startswith((_OPTIMIZER, _MODULE)) else ())
        if not wanted:
            return None, None
        paths, kinds = PathNames.for_this_process(), _VALUES.get(name)
        uses = code_positions.find_uses(wanted, frame, paths, kinds or (bool,))
        if kinds is not None:
            names = _PRECISIONS if str in kinds else {}
            uses = [one._replace(value=names.get(one.value, one.value)) for one in uses]
            return None, code_positions.choose_place(uses, names.get(change.after, change.after))
        value = _find_direction(change)
        uses = [one._replace(value=_OPPOSITES[one.name]) if one.name in _OPPOSITES else one for one in uses]
        if name.startswith(_MODULE):  # the modules were there before
            uses = [one for one in uses if one.place.function.rpartition(".")[2] != "__init__"]
        return None, code_positions.choose_place(uses, value)

    def _find_caller(self, place: OwnPlace | None, frame: FrameType | None) -> OwnPlace | None:
        """Return the line that called the function that made an optimizer, if that function is over at the step's end."""
        if len(self._makers) < 2 or self._makers[0] != place:
            return place
        running = {(one.file, one.function) for one in self._own_lines.list_places(frame)}
        return place if (place.file, place.function) in running else self._makers[1]

    def _find_loss(self) -> tuple[int | None, OwnPlace | None]:
        """Return when and where parameters lost their optimizer, or others took their place."""
        setting = self.unoptimized.changed_setting
        if not setting:
            return self.unoptimized.find_place()
        made = self._noted.get(setting)
        return made if made is not None and made[0] >= self.unoptimized.held_ns else (None, None)


def _find_direction(change: Change) -> bool | None:
    """Return whether a setting was switched on or off, or rose or fell; None if it is no such setting."""
    before, after = change.before, change.after
    if isinstance(before, str) and isinstance(after, str):
        before, after = (True if one == "True" else False if one == "False" else None for one in (before, after))
    if isinstance(after, bool):
        return after
    return after > before if isinstance(before, int) and isinstance(after, int) else None


def _do_nothing(token: Any, time_ns: int, flags: int, result: Any) -> None:
    pass
