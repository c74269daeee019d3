"""Bytes of state that an optimizer of PyTorch keeps for each parameter that it updates, by its class and settings.

The algorithms of https://docs.pytorch.org/docs/stable/optim.html keep moments of the parameter's own shape and dtype:

=========================================  ======================================================
Adam, AdamW, NAdam, RAdam, Adamax          2 moments; 3 with ``amsgrad``
Adadelta, Rprop                            2
SGD, Muon                                  1 with ``momentum``, else none
RMSprop                                    1, and 1 each with ``momentum`` and ``centered``
Adagrad, Lion                              1
=========================================  ======================================================

8-bit optimizers (bitsandbytes, torchao) quantize two moments to a byte each. Adafactor and LBFGS keep what their shapes and
histories need; for them and for unknown classes there is no formula. A step count of 4 bytes per tensor is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TWO_MOMENTS = ("adam", "adamw", "nadam", "radam", "adamax", "adadelta", "rprop")
_ONE_MOMENT = ("adagrad", "lion")


def compute_state_bytes(optimizers: Sequence[Mapping[str, Any]], bytes_each: int) -> int | None:
    """Return the bytes of state of a loop's optimizers, as the ``engine`` event describes them; None without a formula.

    ``bytes_each``: of a parameter.
    """
    total = 0
    for optimizer in optimizers:
        name, count = str(optimizer.get("class") or "").lower(), optimizer.get("parameters")
        each = 2 if "8bit" in name else _multiply_known(_count_moments(name, optimizer.get("settings") or {}), bytes_each)
        if each is None or count is None:
            return None
        total += each * count
    return total


def _multiply_known(count: int | None, size: int) -> int | None:
    return None if count is None else count * size


def _count_moments(name: str, settings: Mapping[str, Any]) -> int | None:
    if name in _TWO_MOMENTS:
        return 3 if settings.get("amsgrad") else 2
    if name in _ONE_MOMENT:
        return 1
    if name in ("sgd", "muon"):
        return 1 if settings.get("momentum") else 0
    if name == "rmsprop":
        return 1 + bool(settings.get("momentum")) + bool(settings.get("centered"))
    return None
