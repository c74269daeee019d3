"""Find the modules whose calls are a loop's forwards, and hook only those.

``module.compile()`` stores the compiled call in the module's attribute ``_compiled_call_impl``, which every call of a module
looks up and torch.compile never sees. While the finder is armed, for the first steps, that attribute of the base class shows
it the outermost call of a module with parameters: a root. From then on only the root has such an attribute. It is neither
copied nor pickled, no graph changes, and other modules cost nothing.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from zerotop_probe.inside import native
from zerotop_probe.inside.counting import StepCounting
from zerotop_probe.inside.guard import (
    AfterHook,
    BeforeHook,
    CostMeter,
    Guard,
    call_from_c,
    make_failure_note,
    now,
    on_removal,
    wrap_function,
    wrap_method,
)
from zerotop_probe.inside.hooks.loops.compiler import hide_from_compiler
from zerotop_probe.recording.interruptions import hide_frames

# A script that calls ``model.forward()`` directly shows its layers as roots. A few are a loop of several models.
MAX_ROOTS = 8
_ATTRIBUTE = "_compiled_call_impl"


class RootCall:
    """Stands in ``module._compiled_call_impl`` and calls the module between two hooks."""

    def __init__(self, module: Any, finder: RootFinder) -> None:
        """Prepare to call the module between the finder's hooks."""
        self._finder = finder
        self._reference = weakref.ref(module)
        self._previous = previous = module.__dict__.get(_ATTRIBUTE)

        def call_original(module: Any, *args: Any, **kwargs: Any) -> Any:
            if previous is not None:
                return previous(*args, **kwargs)
            return sys.modules["torch"].nn.Module._call_impl(module, *args, **kwargs)

        # Looked up now: a call of a model is not the moment for it.
        self._is_compiling = sys.modules["torch"].compiler.is_compiling
        self._call_original = call_original
        before, after = finder.hooks
        self._call = wrap_function(call_original, "forward", before, after, finder.meter)
        self._counting = finder.counting
        self._call_counted = wrap_function(call_original, "forward", before, after, finder.meter, finder.counting)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._counting.is_on:  # then the finder is not armed
                caller = sys._getframe(1).f_locals["self"]
                if caller.training and caller is self._reference():
                    return self._call_counted(caller, *args, **kwargs)
            if self._is_compiling():
                return self._call_original(self._reference(), *args, **kwargs)
            # Replicas of DataParallel, and modules that copy their attributes, have taken this object along.
            caller = sys._getframe(1).f_locals["self"]
            if caller is not self._reference():
                return sys.modules["torch"].nn.Module._call_impl(caller, *args, **kwargs)
            if not self._finder.is_armed:
                return self._call(caller, *args, **kwargs)
            return self.call_between_hooks(caller, *args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    def call_between_hooks(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module, for which this object was made."""
        if not self._finder.is_armed:
            return self._call(module, *args, **kwargs)
        if module.training:
            self._finder.end_evaluation()
        # Modules within a root are none: their calls need not be seen.
        try:
            self._finder.hide_calls()
            return self._call(module, *args, **kwargs)
        finally:
            self._finder.show_calls()

    def restore(self, module: Any) -> None:
        """Give the module back its own call."""
        if self._previous is None:
            del module.__dict__[_ATTRIBUTE]
        else:
            module.__dict__[_ATTRIBUTE] = self._previous

    def __deepcopy__(self, memo: Any) -> RootCall:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def _make_root_call(module: Any, finder: RootFinder) -> RootCall:
    """Return the value for ``module._compiled_call_impl``. If there is C code, it makes the calls in counted steps."""
    code = native.counted_steps
    if code is None or not isinstance(finder.counting, code.StepCounting):
        return RootCall(module, finder)
    return _derive_root_call(code)(module, finder)


@functools.cache
def _derive_root_call(code: Any) -> type[RootCall]:
    class NativeRootCall(code.CountedForward, RootCall):  # type: ignore[misc]
        def __init__(self, module: Any, finder: RootFinder) -> None:
            RootCall.__init__(self, module, finder)
            note_failure = make_failure_note(Guard("forward", finder.meter), *finder.hooks, finder.counting)
            code.CountedForward.__init__(
                self, finder.counting, RootCall.__call__, self._previous, note_failure, id(module), _find_module_class()
            )

    return NativeRootCall


class RootFinder:
    """The roots of one process."""

    def __init__(self, before: BeforeHook, after: AfterHook, meter: CostMeter, counting: StepCounting) -> None:
        """``before`` and ``after`` are called around each forward of a root."""
        self.counting = counting
        self.roots: list[weakref.ref[Any]] = []
        self.joined_ns = 0
        """When the last root was called for the first time."""
        self._compiled: list[weakref.ref[Any]] = []  # modules that may be roots: they do not call the finder
        self._training_roots: list[weakref.ref[Any]] | None = None  # while armed for an evaluation
        self.is_armed = False
        self.hooks = (before, after)
        self.meter = meter
        self._guard = Guard("modules", meter)
        self._python_call = self._make_call()
        self._call_module = call_from_c(self._python_call)

    def _make_call(self) -> Callable[..., Any]:
        def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                is_root = not sys.modules["torch"].compiler.is_compiling() and self._guard.run(self._add_root, module)
                own = module.__dict__[_ATTRIBUTE].call_between_hooks if is_root else None
                return (own or sys.modules["torch"].nn.Module._call_impl)(module, *args, **kwargs)
            except BaseException as error:
                hide_frames(error)
                raise

        return call_module

    def install_hooks(self) -> None:
        """Follow ``module.compile()``, which replaces the attribute of a module."""
        hide_from_compiler(self._python_call, with_callees=False)
        hide_from_compiler(self._add_root)
        wrap_method(_find_module_class(), "compile", self._begin_compile, self._end_compile, self.meter)
        on_removal(self.remove_hooks)

    def follow_evaluations(self, owns_parameters: Callable[[Any], bool]) -> None:
        """Follow ``module.eval()`` of modules that are trained."""

        def after(module: Any, time_ns: int, flags: int, result: Any) -> None:
            if not flags and owns_parameters(module):
                self.begin_evaluation()

        module_class = _find_module_class()
        if wrap_method(module_class, "eval", lambda time_ns, module, args, kwargs: module, after, self.meter):
            hide_from_compiler(module_class.eval, with_callees=False)

    def _begin_compile(self, time_ns: int, module: Any, args: Any, kwargs: Any) -> Any:
        return module

    def _end_compile(self, module: Any, time_ns: int, flags: int, result: Any) -> None:
        if not flags and _ATTRIBUTE in module.__dict__:
            self._compiled.append(weakref.ref(module))
            self._hook_module(module)

    def list_modules(self) -> list[Any]:
        """Return the roots that are alive, in the order of their first calls."""
        return [module for root in self.roots if (module := root()) is not None]

    def note_root(self, module: Any) -> None:
        """Remember a module that was called outside of any other."""
        if id(module) not in [id(root()) for root in self.roots]:
            self.roots = [root for root in self.roots if root() is not None]
            self.roots.append(weakref.ref(module))
            self.joined_ns = now()

    def arm(self) -> None:
        """Begin to see the outermost call of a module."""
        self.counting.stop()
        if not self.is_armed and len(self.list_modules()) < MAX_ROOTS and self._guard.is_on:
            self.is_armed = True
            self.show_calls()

    def disarm(self) -> None:
        """Stop seeing calls of modules other than roots."""
        if self.is_armed:
            self.is_armed = False
            self._training_roots = None
            self.hide_calls()
            roots = self.list_modules()
            blocks = (module for reference in self._compiled if (module := reference()) is not None)
            self._restore_calls(block for block in blocks if not any(block is root for root in roots))
            self._compiled.clear()

    def begin_evaluation(self) -> None:
        """See calls of other modules too, until a root trains: many evaluate the model inside of its wrapper."""
        self.counting.stop()
        if not self.is_armed:
            self.arm()
            self._training_roots = list(self.roots) if self.is_armed else None

    def end_evaluation(self) -> None:
        """Forget the roots of an evaluation: in training they are called within another."""
        if (training := self._training_roots) is not None:
            self.disarm()
            others = [module for module in self.list_modules() if not any(root() is module for root in training)]
            self._restore_calls(others)
            self.roots = training

    def show_calls(self) -> None:
        """Let modules call the finder, while it is armed."""
        if self.is_armed:
            _find_module_class()._compiled_call_impl = self._call_module

    def hide_calls(self) -> None:
        """Let modules be called as usual."""
        _find_module_class()._compiled_call_impl = None

    def remove_hooks(self) -> None:
        """Give all modules back their own calls."""
        self.disarm()
        self._restore_calls(self.list_modules())
        self.roots.clear()

    def _restore_calls(self, modules: Iterable[Any]) -> None:
        for module in modules:
            call = module.__dict__.get(_ATTRIBUTE)
            if isinstance(call, RootCall):
                call.restore(module)

    def _add_root(self, module: Any) -> bool:
        """Hook the module if it may be a root; return whether it is one now."""
        torch = sys.modules["torch"]
        # Not is_fx_tracing(), which prints a warning.
        is_tracing = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
        if is_tracing or isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            return False
        # Before PyTorch 2.5 the compiler calls the layers of a model that it found in a function, to trace them.
        if torch._guards.TracingContext.try_get() is not None:
            return False
        if len(self.roots) >= MAX_ROOTS or next(module.parameters(), None) is None:
            return False
        self._hook_module(module)
        return True

    def _hook_module(self, module: Any) -> None:
        # Not with setattr: a module that torch.compile() made would pass it on to the module inside.
        module.__dict__[_ATTRIBUTE] = _make_root_call(module, self)


def _find_module_class() -> Any:
    return sys.modules["torch.nn.modules.module"].Module
