"""The checkpoint phase: hooks on the functions with which scripts and libraries save. DeepSpeed's engine has its own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from zerotop_probe.inside.guard import is_wrapped, on_removal, wrap_method, wrap_plain_function
from zerotop_probe.inside.hooks.training_hooks import TrainingHooks
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
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint"),
)


class CheckpointHooks(TrainingHooks):
    """Hooks on the functions that save."""

    def install_hooks(self) -> None:
        """Wrap the saving functions of the imported modules, unless they are wrapped already."""
        for module_name, class_name, method in _METHODS:
            owner = getattr(sys.modules.get(module_name), class_name, None)
            if owner is not None:
                wrap_method(owner, method, self._begin_save, self.end_span, self._probe.meter)
        for module_names, name in _FUNCTIONS:
            modules = [sys.modules[module_name] for module_name in module_names if module_name in sys.modules]
            original = getattr(modules[0], name, None) if modules else None
            if original is None or is_wrapped(original):
                continue
            where = f"{module_names[0]}.{name}"
            wrapper = wrap_plain_function(original, where, self._begin_save, self.end_span, self._probe.meter)
            for module in modules:
                if getattr(module, name, None) is original:
                    setattr(module, name, wrapper)
                    on_removal(functools.partial(setattr, module, name, original))

    def _begin_save(self, time_ns: int, subject: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._probe.recorder
        if recorder is None or self._probe.engines.current is None or not self.is_training_thread(False):
            return None
        recorder.end_loose_spans(time_ns)
        # Within another phase it is that phase's time: a script may log tensors in its forward.
        if recorder.stack and recorder.find_phase("eval") is None:
            return None
        self.resume_training(time_ns)
        self._probe.saving_lines.note_save(time_ns)
        return recorder.begin_span(time_ns, "checkpoint_save", self._probe.engines.get_position())
