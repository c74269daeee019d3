"""Measure a training job and write a recording to a session directory. Only ``outside.folding`` reads one."""

from __future__ import annotations

from typing import Any

__all__ = ["attach"]


def attach(engine: Any, session: str | None = None) -> bool:
    """Record a DeepSpeed engine of this process from now on, in scripts that ``zerotop run`` did not start.

    ``session`` is the session directory, by default the one in ``PYTHONZEROTOP_SESSION``. Return whether there is one;
    without a session the call does nothing and may stay in a script. Never raises.
    """
    from zerotop_probe.inside.hooks.hook_installer import attach as attach_engine

    return attach_engine(engine, session)
