"""Find the modules whose calls are a loop's forwards, and hook only those.

While the finder is armed, for the first steps, it sees every call of a module. The outermost module with parameters is a
root. From then on only the root's own call is hooked, through the attribute in which ``module.compile()`` stores what to
call: no graph breaks, nothing of it is copied or pickled, and other modules cost nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from zerotop_probe.inside.guard import AfterHook, BeforeHook, CostMeter, Guard, wrap_function
from zerotop_probe.inside.hooks.loops.compiler import hide_from_compiler

# A script that calls ``model.forward()`` directly shows its layers as roots. A few are a loop of several models.
MAX_ROOTS = 8


class RootCall:
    """Stands in ``module._compiled_call_impl`` and calls the module between two hooks."""

    def __init__(self, module: Any, hooks: tuple[BeforeHook, AfterHook], meter: CostMeter) -> None:
        """Prepare to call the module between the hooks."""
        self._reference = weakref.ref(module)
        self._previous = previous = module._compiled_call_impl

        def call_original(module: Any, *args: Any, **kwargs: Any) -> Any:
            if previous is not None:
                return previous(*args, **kwargs)
            return sys.modules["torch"].nn.Module._call_impl(module, *args, **kwargs)

        self._call_original = call_original
        self._call = wrap_function(call_original, "forward", *hooks, meter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return self._call_original(self._reference(), *args, **kwargs)
        # Replicas of DataParallel, and modules that copy their attributes, have taken this object along.
        caller = sys._getframe(1).f_locals["self"]
        if caller is not self._reference():
            return torch.nn.Module._call_impl(caller, *args, **kwargs)
        return self._call(caller, *args, **kwargs)

    def restore(self, module: Any) -> None:
        """Give the module back its own call."""
        module._compiled_call_impl = self._previous

    def __deepcopy__(self, memo: Any) -> RootCall:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


class RootFinder:
    """The roots of one process."""

    def __init__(self, before: BeforeHook, after: AfterHook, meter: CostMeter) -> None:
        """``before`` and ``after`` are called around each forward of a root."""
        self.roots: list[weakref.ref[Any]] = []
        self._hooks = (before, after)
        self._meter = meter
        self._guard = Guard("modules", meter)
        self._disarm: Callable[[], None] | None = None

    def list_modules(self) -> list[Any]:
        """Return the roots that are alive, in the order of their first calls."""
        return [module for root in self.roots if (module := root()) is not None]

    @property
    def is_armed(self) -> bool:
        """Whether every call of a module is seen."""
        return self._disarm is not None

    def arm(self) -> None:
        """Begin to see every call of a module."""
        if not self.is_armed and len(self.list_modules()) < MAX_ROOTS:
            self._guard.run(self._replace_call)

    def disarm(self) -> None:
        """Stop seeing calls of modules other than roots."""
        disarm, self._disarm = self._disarm, None
        if disarm is not None:
            disarm()

    def remove_hooks(self) -> None:
        """Give all modules back their own calls."""
        self.disarm()
        for module in self.list_modules():
            call = module.__dict__.get("_compiled_call_impl")
            if isinstance(call, RootCall):
                call.restore(module)
        self.roots.clear()

    def _replace_call(self) -> None:
        torch = sys.modules["torch"]
        module_class, original = torch.nn.Module, torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        threads_inside: set[int] = set()  # of an outermost call

        def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._disarm is not disarm or get_ident() in threads_inside:
                return original(module, *args, **kwargs)
            if not self._guard.run(self._add_root, module):
                return original(module, *args, **kwargs)
            thread = get_ident()
            threads_inside.add(thread)
            try:
                return original(module, *args, **kwargs)
            finally:
                threads_inside.discard(thread)

        def disarm() -> None:
            # While somebody else has replaced it too, as a tracer of torch.fx, ours stays and passes calls on.
            if module_class.__call__ is call_module:
                module_class.__call__ = original

        hide_from_compiler(call_module)
        module_class.__call__ = call_module
        self._disarm = disarm

    def _add_root(self, module: Any) -> bool:
        """Hook the module if it may be a root, and return whether it has parameters."""
        torch = sys.modules["torch"]
        if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            return False
        if next(module.parameters(), None) is None:
            return False
        self.roots = [root for root in self.roots if root() is not None]
        if not isinstance(module._compiled_call_impl, RootCall) and len(self.roots) < MAX_ROOTS:
            module._compiled_call_impl = RootCall(module, self._hooks, self._meter)
            self.roots.append(weakref.ref(module))
        return True
