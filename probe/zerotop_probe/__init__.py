"""Measures a training job and writes what it saw to a session directory. Never reads a recording."""

from __future__ import annotations

from typing import Any

__all__ = ["attach"]


def attach(engine: Any, session: str | None = None) -> bool:
    """Records a DeepSpeed engine of this process from now on, for scripts that are not started by ``zerotop
    run``.

    ``session`` is the session's directory, by default the one that ``PYTHONZEROTOP_SESSION`` names. Returns
    whether there is one to record to; without any this does nothing, so the call may stay in a script. Never
    raises.
    """
    from zerotop_probe.inside.hooks.hook_installer import attach as attach_engine

    return attach_engine(engine, session)
