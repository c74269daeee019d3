"""Install the hooks of each module after its import; start and stop the probe."""

from __future__ import annotations

import os
import sys
from typing import Any

from zerotop_probe.inside.guard import Guard, now
from zerotop_probe.inside.hooks.dataloader import DataLoaderHooks
from zerotop_probe.inside.hooks.engine_hooks import EngineHooks
from zerotop_probe.inside.hooks.hf_trainer import TrainerHooks
from zerotop_probe.inside.hooks.logging_hooks import LoggingHooks
from zerotop_probe.inside.hooks.loops.loop_hooks import LoopHooks
from zerotop_probe.inside.hooks.pipeline import install_pipeline
from zerotop_probe.inside.node_start import start_part
from zerotop_probe.inside.probe import Probe
from zerotop_probe.recording import events

ENGINE_MODULE = "deepspeed.runtime.engine"
PIPELINE_MODULE = "deepspeed.runtime.pipe.engine"
TRAINER_MODULE = "transformers.trainer"
OPTIMIZER_MODULE = "torch.optim.optimizer"

PROBE = Probe()
_engine_hooks = EngineHooks(PROBE)
_loop_hooks = LoopHooks(PROBE, lambda: _install_loaded_modules())


def install_hooks(module: Any) -> None:
    """Install the hooks for one of the modules above after its execution. Never raises."""
    Guard(f"install in {module.__name__}", PROBE.meter).run(_install_module, module)


def _install_module(module: Any) -> None:
    if module.__name__ == ENGINE_MODULE:
        _engine_hooks.install_hooks(module.DeepSpeedEngine)
        LoggingHooks(PROBE).install_monitor(module.MonitorMaster)
        DataLoaderHooks(PROBE).install_hooks()
    elif module.__name__ == PIPELINE_MODULE:
        install_pipeline(module.PipelineEngine, _engine_hooks, PROBE)
    elif module.__name__ == TRAINER_MODULE:
        TrainerHooks(PROBE).install_hooks(module)
        LoggingHooks(PROBE).install_trainer(module.Trainer)
    elif module.__name__ == OPTIMIZER_MODULE:
        Guard("node start", PROBE.meter).run(start_part, os.environ)
        _loop_hooks.install_hooks(module)
        PROBE.debug_modes.install_hooks()
        PROBE.cache_clearing.install_hooks()
        PROBE.setting_lines.install_hooks()
        PROBE.graph_replays.install_hooks()


def attach(engine: Any, recording: str | None = None) -> bool:
    """Begin to record an existing engine; see :func:`zerotop_probe.attach`."""
    guard = Guard("attach", PROBE.meter)
    guard.run(_install_loaded_modules)
    return bool(guard.run(_adopt_engine, engine, recording))


def enter(recording: str) -> str:
    """Begin to record a running process. Called by code that ``zerotop attach`` injects.

    Return "entered" if that succeeded. Nothing is done and the result is "early" if PyTorch is not imported yet, "leaving"
    if the probe is about to leave another recording, or the path of the one that records this process already. Exceptions
    propagate to the caller.
    """
    if PROBE.recording and os.path.realpath(PROBE.recording) == os.path.realpath(recording):
        PROBE.leaving = False  # cancels a request to leave at the end of the step
        return recording
    if PROBE.recording:
        if not PROBE.leaving and os.path.isdir(PROBE.recording):
            return PROBE.recording
        if leave() == "leaving":
            return "leaving"
    if OPTIMIZER_MODULE not in sys.modules:
        return "early"
    _install_loaded_modules()
    PROBE.start_recording(recording, late=True)
    assert PROBE.recorder is not None
    PROBE.recorder.write_event(now(), events.Entered)
    _loop_hooks.begin_late()
    return "entered"


def _install_loaded_modules() -> None:
    for name in (OPTIMIZER_MODULE, ENGINE_MODULE, PIPELINE_MODULE, TRAINER_MODULE):
        if name in sys.modules:
            _install_module(sys.modules[name])


def leave() -> str:
    """Remove the probe as soon as no phase is in progress.

    Return "left" if it is removed, "leaving" if the next step will remove it, "absent" if there was none.
    """
    if not PROBE.recording:
        return "absent"
    # A loop may be over, as in a notebook between two cells.
    is_between_phases = PROBE.engines.loop is not None and PROBE.recorder is not None and not PROBE.recorder.stack
    if PROBE.engines.current is None or is_between_phases:
        PROBE.leave_process()
        return "left"
    PROBE.leaving = True
    PROBE.counting.stop()  # the next step's end must have all of its hooks
    return "leaving"


def _adopt_engine(engine: Any, recording: str | None) -> bool:
    if not PROBE.start_recording(recording):
        return False
    _engine_hooks.adopt_engine(engine)
    return True
