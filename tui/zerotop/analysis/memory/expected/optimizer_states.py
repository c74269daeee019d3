"""Bytes of state that an optimizer keeps for the parameters that it updates, by its class and settings.

From the sources of PyTorch 2.4 to 2.13 (torch/optim, algorithms at https://docs.pytorch.org/docs/stable/optim.html), with
moments of the parameter's own shape and dtype, and scalars for each parameter of 4 bytes:

=============================  =======================================  ===============================================
class                          moments                                  scalars
=============================  =======================================  ===============================================
Adam, AdamW                    2; 3 with ``amsgrad``                    step
RAdam, Adamax, Adadelta,       2                                        step
Rprop
NAdam                          2                                        step, mu_product
SparseAdam                     2                                        none
RMSprop                        1, and 1 each with ``momentum`` and      step
                               ``centered``
Adagrad                        1                                        step
ASGD                           1                                        step, eta, mu; with the parameter
SGD                            1 with ``momentum``, else none           none
Muon, Lion                     1                                        none
Adafactor                      rows and columns; 1 of a vector          step
=============================  =======================================  ===============================================

Scalars are in host memory, and with the parameter if ``capturable`` or ``fused``. Classes of that name elsewhere keep the
same moments, but their scalars are numbers of Python.

Adafactor ("Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv:1804.04235) keeps n + m
elements for an n x m matrix, and the same for each matrix of a parameter with more dimensions. That of transformers
(transformers/optimization.py) keeps them in fp32 for 16-bit parameters, one more moment with ``beta1``, and a scalar with
the parameter.

bitsandbytes (bitsandbytes/optim/optimizer.py) keeps fp32. With 8 bits it keeps one byte an element, 4 bytes for each block
of 256, and two tables of 1 KiB, but fp32 in parameters of less than 4,096 elements. Paged state is not in PyTorch's
allocator. torchao (torchao/optim) does the same with tables for each parameter, but not in parameters whose size is no
multiple of 256.

LBFGS keeps a history; for it and for unknown classes there is no formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerotop_probe.recording.events import EngineOptimizer, ParameterKind

_TWO_MOMENTS = ("adam", "adamw", "nadam", "radam", "adamax", "adadelta", "rprop", "sparseadam")
_ONE_MOMENT = ("adagrad", "asgd", "lion", "muon")
# Of bitsandbytes, without "paged" and "8bit" in the name.
_BITSANDBYTES = {"adam": 2, "adamw": 2, "ademamix": 3, "lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 1}
# Of PyTorch; one in other classes.
_SCALARS = {"nadam": 2, "asgd": 3, "sparseadam": 0, "sgd": 0, "muon": 0}
_SCALAR_BYTES = 4
# Of quantized state.
_LEAST_ELEMENTS, _BLOCK, _TABLE_BYTES = 4096, 256, 1024

DTYPE_BYTES = {"fp64": 8, "fp32": 4}
"""Bytes of an element by the dtype's name; 2 for others."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of state of a loop's optimizers, on all ranks together where they share it."""

    moments: int  # shared like the parameters
    scalars: int  # on the device of the parameters, of each rank
    host_scalars: int  # in host memory, of each rank


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Parameters of one kind."""

    shape: Sequence[int]
    item_bytes: int
    count: int
    state_bits: int | None  # of bitsandbytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def compute_state_bytes(
    optimizers: Sequence[EngineOptimizer], bytes_each: int, *, is_sharded: bool = False
) -> StateBytes | None:
    """Return the state of a loop's optimizers, as the ``engine`` event describes them; None without a formula.

    Args:
        bytes_each: of a parameter, if the recording does not have the updated parameters.
        is_sharded: whether ranks share parameters, of which only the number of elements is then of use.
    """
    moments = scalars = host_scalars = 0
    for optimizer in optimizers:
        name, package = (optimizer.class_ or "").lower(), optimizer.package or ""
        settings, kinds = optimizer.settings or {}, optimizer.tensors
        compute = _find_formula(name, package, settings, has_shapes=bool(kinds) and not is_sharded)
        if kinds:
            tensors = list(map(_read_tensors, kinds))
        elif optimizer.parameters is not None:
            tensors = [_Tensor((optimizer.parameters,), bytes_each, 1, None)]
        else:
            return None
        if compute is None:
            return None
        moments += sum(compute(tensor) * tensor.count for tensor in tensors)
        scalars += _size_tables(name, tensors) if package == "bitsandbytes" else 0
        each = sum(_size_scalars(name, package, tensor) * tensor.count for tensor in tensors if kinds)
        if settings.get("capturable") or settings.get("fused") or name == "asgd" or package == "transformers":
            scalars += each
        else:
            host_scalars += each
    return StateBytes(moments, scalars, host_scalars)


def _read_tensors(kind: ParameterKind) -> _Tensor:
    return _Tensor(kind.shape, DTYPE_BYTES.get(kind.dtype, 2), kind.count, kind.state_bits)


def _find_formula(
    name: str, package: str, settings: Mapping[str, Any], *, has_shapes: bool
) -> Callable[[_Tensor], int] | None:
    """Return the function that computes the bytes of a parameter's state, without scalars; None if there is none."""
    if name == "adafactor":
        if not has_shapes or package not in ("torch", "transformers"):
            return None
        return _size_factored if package == "torch" else lambda tensor: _size_of_transformers(tensor, settings)
    if package == "bitsandbytes":
        count = _BITSANDBYTES.get(_strip(name))
        return None if count is None or settings.get("is_paged") else lambda tensor: count * _size_bitsandbytes(tensor)
    moments = _count_moments(name.removesuffix("8bit"), settings)
    if moments is None:
        return None
    if "8bit" in name:
        return lambda tensor: moments * (_size_torchao(tensor) if package == "torchao" else tensor.elements)
    return lambda tensor: moments * tensor.elements * tensor.item_bytes


def _count_moments(name: str, settings: Mapping[str, Any]) -> int | None:
    if name in _TWO_MOMENTS:
        return 3 if settings.get("amsgrad") else 2
    if name in _ONE_MOMENT:
        return 1
    if name == "sgd":
        return 1 if settings.get("momentum") else 0
    if name == "rmsprop":
        return 1 + bool(settings.get("momentum")) + bool(settings.get("centered"))
    return None


def _size_scalars(name: str, package: str, tensor: _Tensor) -> int:
    if package == "transformers":  # computed from the parameter in this dtype
        return max(_SCALAR_BYTES, tensor.item_bytes)
    count = _SCALARS.get(name, 1) if package == "torch" else int(package == "torchao")
    return _SCALAR_BYTES * count


def _size_factored(tensor: _Tensor) -> int:
    shape = tensor.shape
    if len(shape) < 2:
        return tensor.elements * tensor.item_bytes
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1]) * tensor.item_bytes


def _size_of_transformers(tensor: _Tensor, settings: Mapping[str, Any]) -> int:
    wide = replace(tensor, item_bytes=max(4, tensor.item_bytes))
    moment = wide.elements * wide.item_bytes if settings.get("beta1") is not None else 0
    return _size_factored(wide) + moment


def _strip(name: str) -> str:
    return name.removeprefix("paged").removesuffix("8bit").removesuffix("32bit")


def _size_bitsandbytes(tensor: _Tensor) -> int:
    if tensor.state_bits != 8 or tensor.elements < _LEAST_ELEMENTS:
        return 4 * tensor.elements
    return tensor.elements + 4 * -(-tensor.elements // _BLOCK)


def _size_tables(name: str, tensors: Sequence[_Tensor]) -> int:
    """Return the bytes of bitsandbytes' tables of quantized values, which all parameters share."""
    quantizes = any(tensor.state_bits == 8 and tensor.elements >= _LEAST_ELEMENTS for tensor in tensors)
    return _TABLE_BYTES * min(2, _BITSANDBYTES.get(_strip(name), 0)) if quantizes else 0


def _size_torchao(tensor: _Tensor) -> int:
    if tensor.elements < _LEAST_ELEMENTS or tensor.elements % _BLOCK:
        return tensor.elements * tensor.item_bytes
    return tensor.elements + 4 * (tensor.elements // _BLOCK) + _TABLE_BYTES
