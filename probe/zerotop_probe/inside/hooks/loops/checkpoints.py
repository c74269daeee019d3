"""The checkpoint phase: the functions with which scripts and libraries save a model without DeepSpeed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import on_removal, wrap_function, wrap_method
from zerotop_probe.inside.hooks.loops import lightning
from zerotop_probe.inside.hooks.loops.loop import Loop
from zerotop_probe.inside.span import Span

# Functions by the modules that have them under that name; they save by their own means or call torch.save many times.
_FUNCTIONS = (
    (("torch", "torch.serialization"), "save"),
    (("safetensors.torch",), "save_file"),
    (("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver"), "save"),
)
_METHODS = (
    ("transformers.trainer", "Trainer", "_save_checkpoint"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("accelerate.accelerator", "Accelerator", "save_state"),
    *((f"{package}.trainer.trainer", "Trainer", "save_checkpoint") for package in lightning.PACKAGES),
)


class CheckpointHooks:
    """Hooks on the functions that save."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def install_hooks(self) -> None:
        """Wrap those functions whose modules are imported."""
        meter = self._loop.probe.meter
        for module_name, class_name, method in _METHODS:
            owner = getattr(sys.modules.get(module_name), class_name, None)
            if owner is not None:
                wrap_method(owner, method, self._begin_save, self._loop.end_span, meter)
        for module_names, name in _FUNCTIONS:
            modules = [sys.modules[module_name] for module_name in module_names if module_name in sys.modules]
            original = getattr(modules[0], name, None) if modules else None
            if original is None:
                continue
            wrapper = self._wrap_save(original, f"{module_names[0]}.{name}")
            for module in modules:
                if getattr(module, name, None) is original:
                    setattr(module, name, wrapper)
                    on_removal(functools.partial(setattr, module, name, original))

    def _wrap_save(self, original: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call_original(subject: None, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        measured = wrap_function(call_original, where, self._begin_save, self._loop.end_span, self._loop.probe.meter)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            return measured(None, *args, **kwargs)

        return save

    def _begin_save(self, time_ns: int, subject: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._loop.find_recorder()
        if recorder is None or not self._loop.is_training_thread(False):
            return None
        recorder.end_loose_spans(time_ns)
        # Within another phase it is that phase's time: a script may log tensors in its forward.
        if recorder.stack and recorder.find_phase("eval") is None:
            return None
        self._loop.resume_training(time_ns)
        return recorder.begin_span(time_ns, "checkpoint_save", self._loop.get_position())
