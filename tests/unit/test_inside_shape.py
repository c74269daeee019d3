"""How large a micro-batch is, from whatever a forward is given."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

from zerotop_probe.inside.inspection import batch_shape

torch = pytest.importorskip("torch")

UNKNOWN = (-1, -1, -1)
IDS = torch.zeros(3, 5, dtype=torch.long)
PIXELS = torch.zeros(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {"input_ids": IDS, "labels": torch.zeros(3, 9)}, (3, 5, 15)),
        ((), {"attention_mask": torch.ones(3, 7, dtype=torch.bool), "input_ids": IDS}, (3, 5, 15)),
        ((IDS,), {}, (3, 5, 15)),
        ((IDS.int(), PIXELS), {}, (3, 5, 15)),
        (({"input_ids": IDS},), {}, (3, 5, 15)),
        ((UserDict(input_ids=IDS),), {}, (3, 5, 15)),
        ((), {"batch": {"pixels": PIXELS, "input_ids": IDS}}, (3, 5, 15)),
        ((PIXELS,), {}, (4, -1, -1)),
        (([PIXELS, IDS],), {}, (4, -1, -1)),
        (((("deep", IDS),),), {}, (3, 5, 15)),
        ((), {"inputs_embeds": torch.zeros(3, 5, 16)}, (3, -1, -1)),
        ((torch.zeros(6, 2),), {}, (6, -1, -1)),
        ((torch.zeros(6, 2, dtype=torch.uint8),), {}, (6, -1, -1)),
        ((), {"input_ids": None, "labels": IDS}, (3, 5, 15)),
        ((torch.tensor(1.0),), {}, UNKNOWN),
        ((), {}, UNKNOWN),
        (("text", 3, None), {"flag": True}, UNKNOWN),
        (([*range(10000), IDS],), {}, UNKNOWN),
    ],
)
def test_shapes(args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert batch_shape.measure_batch(args, kwargs) == expected
