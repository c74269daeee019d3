"""Which values that a training logs are read: those on the host, and nothing that the job could notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.inside.logged_values import read_number

torch = pytest.importorskip("torch")


class CountedOperations(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """A mode of a job that counts its operations, as counters of FLOPs do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (2.5, 2.5),
        (np.float32(2.5), 2.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([2.5], requires_grad=True), 2.5),
        (True, None),
        ("2.5", None),
        (np.array([2.5]), None),
        (torch.tensor([2.5, 3.5]), None),
        (torch.empty(1, device="meta"), None),
    ],
)
def test_numbers_on_the_host_are_read(value: Any, number: float | None) -> None:
    assert read_number(value) == number


def test_no_operation_of_ours_is_counted_by_the_job() -> None:
    loss = torch.tensor(2.5)
    with CountedOperations() as counted:
        assert read_number(loss) is None
        assert read_number(2.5) == 2.5
    assert counted.count == 0


def test_values_are_of_the_steps_of_the_rank_that_logged_them() -> None:
    processes = []
    for rank, end_ns in ((1, 12), (0, 10)):  # rank 1 made its engine first
        rows = np.zeros(1, STEP_DTYPE)
        rows["rank"], rows["end_unix_ns"] = rank, end_ns
        processes.append(SimpleNamespace(step_rows=rows))
    found = RecordingSource.find_logging_steps(cast(Any, SimpleNamespace(rank_steps=processes)), 10)
    assert found["rank"].tolist() == [0]
