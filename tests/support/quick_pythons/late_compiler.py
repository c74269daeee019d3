"""PyTorch's compiler, imported by the jobs that compile.

The first optimizer of a process imports ``torch._dynamo``, which takes almost as long as to import torch: to exempt methods
from compilation, and to end a graph before and after its step. DeepSpeed's engine imports the optimizer Muon, three
functions of which are compiled, and with them Inductor: that is more than half of the time in which a rank starts. Where
nothing is compiled, none of this has an effect.
"""

from __future__ import annotations

import functools
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
DEEPSPEED_COMPILER = "deepspeed.runtime.compiler"
# These import the compiler for nothing else. Others need all of it, and at the moment when they import it.
WANTED_LATE = ("torch._compile", "torch.compiler", "torch.optim.optimizer")
# A module in it that needs nothing of it. Transformers imports it for the masks of its models.
STANDING_ALONE = "torch._dynamo._trace_wrapped_higher_order_op"


def exempt_function(function: Any = None, *_: Any, **__: Any) -> Any:
    """Stand in for a decorator that matters to compiled functions only: return the function, or a decorator without one."""
    return exempt_function if function is None else function


# A type of Python that is called without arguments does nothing, and is in no stack.
WITHOUT_COMPILER = {
    "disable": exempt_function,
    "allow_in_graph": exempt_function,
    "assume_constant_result": exempt_function,
    "graph_break": int,
}


class NothingCompiled:
    """A replacement for the type of compiled modules, of which there are no instances."""


# What PyTorch and Accelerate ask of parts of the compiler whenever they connect ranks or distribute a model.
PARTS_WITHOUT_COMPILER: dict[str, dict[str, Any]] = {
    "eval_frame": {"OptimizedModule": NothingCompiled},
    "trace_rules": {"clear_lru_cache": int},
    "utils": {"get_optimize_ddp_mode": str},
}


def is_wanted_late() -> bool:
    """Return whether one of those modules imports the compiler now."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("importlib", "_frozen_importlib", __name__):
        frame = frame.f_back
    return frame.f_globals.get("__name__") in WANTED_LATE


def find_imported() -> str:
    """Return the name of the module that is being imported, for which its package has just been asked."""
    return str(sys._getframe(2).f_locals.get("name", ""))


class LateModule(ModuleType):
    """A module that is executed when another module imports it, or at the first use of an attribute without a substitute."""

    def __getattribute__(self, name: str) -> Any:
        if name in WITHOUT_COMPILER:
            return WITHOUT_COMPILER[name]
        if name in PARTS_WITHOUT_COMPILER:
            return LatePart(self, name)
        # Whoever imports it or a module in it asks for one of these two; `inspect` asks all modules for their files.
        is_import = name == "__path__" or (name == "__spec__" and not is_wanted_late())
        is_needed = is_import and find_imported() != STANDING_ALONE
        if name.startswith("__") and not is_needed:
            return object.__getattribute__(self, name)
        execute_module(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if f"{COMPILER}.{name}" != STANDING_ALONE:
            execute_module(self)
        object.__setattr__(self, name, value)


class LatePart:
    """A part of a late module, which is executed at the first use of a name that PARTS_WITHOUT_COMPILER lacks."""

    def __init__(self, late: ModuleType, name: str) -> None:
        self.late = late
        self.name = name

    def __getattr__(self, function: str) -> Any:
        if function in PARTS_WITHOUT_COMPILER[self.name]:
            return PARTS_WITHOUT_COMPILER[self.name][function]
        if isinstance(self.late, LateModule):
            execute_module(self.late)
        return getattr(getattr(self.late, self.name), function)


def execute_module(module: Any) -> None:
    """Make a usual module of a late one."""
    object.__setattr__(module, "__class__", ModuleType)
    module.__spec__.loader.exec_module(module)


class LateLoader:
    """A loader of a LateModule, which is executed by the loader of the real module."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> None:
        """Return None, for a module as any other."""

    def exec_module(self, module: Any) -> None:
        """Make the module late."""
        module.__spec__.loader = module.__loader__ = self.loader
        module.__class__ = LateModule


class DeepSpeedLoader(LateLoader):
    """A loader of DeepSpeed's module ``compiler`` whose decorator ``compile()`` compiles in the first call."""

    def exec_module(self, module: Any) -> None:
        """Execute the module and replace the function."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        module.compile = lambda: compile_late


def compile_late(function: Any) -> Any:
    """Return a function that compiles this one with ``torch.compile`` in its first call."""
    compiled: list[Any] = []

    @functools.wraps(function)
    def call_compiled(*args: Any, **kwargs: Any) -> Any:
        import torch

        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call_compiled


class Finder:
    """A finder of both modules."""

    def __init__(self) -> None:
        self.loaders = {COMPILER: LateLoader, DEEPSPEED_COMPILER: DeepSpeedLoader}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of one of the modules, or None for all others."""
        if name not in self.loaders or (name == COMPILER and not is_wanted_late()):
            return None
        make_loader = self.loaders.pop(name)
        spec: Any = find_spec(name)
        if spec is not None:
            spec.loader = make_loader(spec.loader)
        return spec


def install_finder() -> None:
    """Find the modules from now on."""
    sys.meta_path.insert(0, Finder())
