"""DeepSpeed configurations as DeepSpeed itself reads them: files in Hjson, which JSON is part of, and base64 text."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson

from zerotop.commands.common.errors import Problem


def read_deepspeed_config(source: str) -> dict[str, Any]:
    """Return the configuration in a file, or in base64. Raises Problem."""
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(f"The DeepSpeed config {source} is not text: {error}") from error
    except (OSError, ValueError) as error:
        if (decoded := _decode(source)) is None:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Problem(f"Cannot read the DeepSpeed config {source}: {reason}") from error
        text, source = decoded, "in base64"
    try:
        content = hjson.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise Problem(f"The DeepSpeed config {source} is not JSON: {error}") from error
    if not isinstance(content, dict) or not content:
        raise Problem(f"The DeepSpeed config {source} is not a JSON object with settings")
    return content


def read_zero_mode(config: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return a config's ZeRO stage, and the devices to which it offloads the optimizer and the parameters.

    Parts that have no effect at the stage do not count. Raises Problem.
    """
    try:
        zero = config.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        devices = [str((zero.get(key) or {}).get("device", "none")) for key in ("offload_optimizer", "offload_param")]
    except (AttributeError, TypeError, ValueError):
        raise Problem("The DeepSpeed config has no valid zero_optimization") from None
    return stage, devices[0] if stage > 0 else "none", devices[1] if stage == 3 else "none"


def _decode(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text).decode()
    except (ValueError, binascii.Error):
        return None
    return decoded if "{" in decoded else None


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raise ValueError for a key that is there twice, as DeepSpeed does."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"it has {' and '.join(twice)} twice")
    return dict(pairs)
