"""Measure a training job and write a recording to a recording folder. Only ``outside.folding`` reads one."""

# No module of the standard library is imported here, see ``outside.own_python``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["attach", "load_ipython_extension", "unload_ipython_extension"]


def attach(engine: "Any", recording: "str | None" = None) -> bool:
    """Record a DeepSpeed engine of this process from now on, in scripts that ``zerotop run`` did not start.

    ``recording`` is its folder, by default the one in ``PYTHONZEROTOP_SESSION``. Return whether there is one;
    without a recording the call does nothing and may stay in a script. Never raises.
    """
    from zerotop_probe.inside.own_imports import import_hook_installer

    return bool(import_hook_installer().attach(engine, recording))


def load_ipython_extension(shell: "Any") -> None:
    """Record the kernel of a notebook from now on: ``%load_ext zerotop_probe``."""
    from zerotop_probe.inside.own_imports import standard_modules

    with standard_modules():
        from zerotop_probe.notebook import begin_recording
    print(begin_recording())


def unload_ipython_extension(shell: "Any") -> None:
    """End that recording: ``%unload_ext zerotop_probe``."""
    from zerotop_probe.notebook import end_recording

    print(end_recording())
