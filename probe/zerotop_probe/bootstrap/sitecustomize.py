"""First file that every interpreter of a recorded job runs: waits for the import of PyTorch's optimizers or
DeepSpeed, then loads the probe.

It must not raise, print, leave a name behind or cost time in any version of Python. It therefore imports only modules that
the interpreter has already loaded, and its syntax is valid in old versions. Without a recording it only removes itself.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AWAITED_MODULES = (
    "torch.optim.optimizer",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine",
    "transformers.trainer",
)

MYPY = False
if MYPY:
    from typing import Any  # noqa: F401


class _ImportHook(object):  # noqa: UP004
    """A finder that changes no import, but notifies the probe after one of ``_AWAITED_MODULES`` was executed."""

    def find_spec(self, name, path=None, target=None):
        # type: (str, Any, Any) -> Any
        if name not in _AWAITED_MODULES:
            return None
        for finder in sys.meta_path:
            search = None if finder is self else getattr(finder, "find_spec", None)
            spec = search and search(name, path, target)
            if spec is not None:
                try:
                    _notify_after_execution(spec.loader)
                except BaseException as error:
                    if _is_interruption(error):
                        raise
                    _report_error(name)
                return spec
        return None


def _notify_after_execution(loader):
    # type: (Any) -> None
    execute = loader.exec_module

    def exec_module(module):
        # type: (Any) -> None
        try:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            try:
                _import_hook_installer().install_hooks(module)
            except BaseException as error:
                if _is_interruption(error):
                    raise
                _report_error(module.__name__)
        except BaseException as error:
            # A traceback of the job shows no frame of this file.
            while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
                error.__traceback__ = error.__traceback__.tb_next
            raise

    loader.exec_module = exec_module


def _is_interruption(error):
    # type: (BaseException) -> bool
    """Return whether this is an exception of the job, as of a signal handler, and not one of the probe."""
    module = sys.modules.get("zerotop_probe.recording.interruptions")
    return module.is_interruption(error) if module else not isinstance(error, Exception)


def _import_hook_installer():
    # type: () -> Any
    """Import it by file path: the job's environment need not have ``zerotop_probe`` installed."""
    import importlib.util

    package = sys.modules.get("zerotop_probe")
    if package is None:
        root = os.path.dirname(_FOLDER)
        spec = importlib.util.spec_from_file_location(
            "zerotop_probe", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
        )  # type: Any
        package = sys.modules["zerotop_probe"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module("zerotop_probe.inside.own_imports").import_hook_installer()


def _report_error(where):
    # type: (str) -> None
    if os.environ.get("PYTHONZEROTOP_DEBUG") == "1":
        import traceback

        sys.stderr.write("zerotop: no probe in %s\n%s" % (where, traceback.format_exc()))  # noqa: UP031


def _step_aside():
    # type: () -> None
    """Remove this folder from the path and this module from ``sys.modules``; children inherit the environment."""
    folders = [_FOLDER, os.path.dirname(__file__)]
    if os.environ.get("PYTHONPATH") == _FOLDER + os.pathsep and os.environ.get("PYTHONZEROTOP_SESSION"):
        folders.append(os.getcwd())  # Ray put no value where the node's own goes; nobody asked for this folder
    sys.path[:] = [entry for entry in sys.path if entry not in folders]
    sys.modules.pop("sitecustomize", None)


if os.environ.get("PYTHONZEROTOP_SESSION") and sys.version_info >= (3, 9):
    sys.meta_path.insert(0, _ImportHook())
_step_aside()

# The sitecustomize that this one shadows. If there is none, or it fails, site.py gets the same exception as without this
# file and handles it as usual.
import sitecustomize  # type: ignore  # noqa: E402, F401
