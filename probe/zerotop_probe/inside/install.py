"""Puts the hooks where they belong, as the modules that they belong to are imported."""

from __future__ import annotations

import sys
from typing import Any

from zerotop_probe.inside.data import Data
from zerotop_probe.inside.part import Part
from zerotop_probe.inside.pipeline import install_pipeline
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.trainer import TrainerHooks
from zerotop_probe.inside.training import Hooks

ENGINE_MODULE = "deepspeed.runtime.engine"
PIPELINE_MODULE = "deepspeed.runtime.pipe.engine"
TRAINER_MODULE = "transformers.trainer"

PROBE = Probe()
_hooks = Hooks(PROBE)


def imported(module: Any) -> None:
    """To be told once of each of the modules above, after it has been executed. Never raises."""
    Part(f"install in {module.__name__}", PROBE.meter).run(_install, module)


def _install(module: Any) -> None:
    if module.__name__ == ENGINE_MODULE:
        _hooks.install(module.DeepSpeedEngine)
        Data(PROBE).install()
    elif module.__name__ == PIPELINE_MODULE:
        install_pipeline(module.PipelineEngine, _hooks, PROBE)
    elif module.__name__ == TRAINER_MODULE:
        TrainerHooks(PROBE).install(module)


def attach(engine: Any, session: str | None = None) -> bool:
    """Begins to record an engine that exists already; see :func:`zerotop_probe.attach`."""
    part = Part("attach", PROBE.meter)
    for name in (ENGINE_MODULE, PIPELINE_MODULE, TRAINER_MODULE):
        if name in sys.modules:
            part.run(_install, sys.modules[name])
    return bool(part.run(_adopt, engine, session))


def _adopt(engine: Any, session: str | None) -> bool:
    if not PROBE.wake(session):
        return False
    _hooks.adopt(engine)
    return True
