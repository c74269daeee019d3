"""Points at any times become columns of a chart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zerotop.ui.charts import resample_mean

NAN = np.nan


def test_every_point_counts_in_its_column() -> None:
    x = np.array([0.0, 1.0, 4.0, 5.0, 9.9, 10.0])
    y = np.array([3.0, -1.0, 7.0, 8.0, 2.0, 100.0])
    assert resample_mean(x, y, 0, 10, 2).tolist() == [3, pytest.approx(110 / 3)]  # the point exactly at the end counts


def test_columns_without_points_are_nan_or_hold_the_last_value() -> None:
    x, y = np.array([0.5, 3.2]), np.array([5.0, 6.0])
    assert resample_mean(x, y, 0, 5, 5).tolist() == pytest.approx([5, NAN, NAN, 6, NAN], nan_ok=True)
    assert resample_mean(x, y, 0, 5, 5, hold=0.5).tolist() == pytest.approx([5, 5, NAN, 6, NAN], nan_ok=True)
    assert resample_mean(x, y, 0, 5, 5, hold=9).tolist() == [5, 5, 5, 6, 6]
    assert resample_mean(x, y, 1, 3, 2, hold=9).tolist() == [5, 5]  # held from before the range


def test_nan_is_no_point() -> None:
    x, y = np.arange(4.0), np.array([NAN, 2.0, NAN, NAN])
    assert resample_mean(x, y, 0, 4, 2).tolist() == pytest.approx([2, NAN], nan_ok=True)


times = st.lists(st.floats(-1e6, 1e6), max_size=60).map(lambda values: np.array(sorted(values)))


@given(times, st.data(), st.integers(0, 40), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_no_point_is_lost(x: np.ndarray, data: st.DataObject, columns: int, begin: float, length: float) -> None:
    y = data.draw(arrays(np.float64, len(x), elements=st.just(NAN) | st.floats(-1e6, 1e6)))
    end = begin + length
    means = resample_mean(x, y, begin, end, columns)
    assert means.shape == (columns,)
    shown = y[(x >= begin) & (x <= end) & ~np.isnan(y)]
    if columns and len(shown):
        assert shown.min() - 1e-6 <= np.nanmin(means) <= np.nanmax(means) <= shown.max() + 1e-6
        assert (~np.isnan(means)).sum() <= len(shown)
    else:
        assert np.isnan(means).all()
    if columns == 1 and len(shown):
        assert means[0] == pytest.approx(shown.mean(), abs=1e-6)
    assert resample_mean(x, y, begin, end, columns, hold=length).shape == (columns,)


def test_whole_numbers_of_any_width_are_points() -> None:
    for dtype in (np.int64, np.uint32, np.float32):
        assert resample_mean(np.arange(4), np.array([1, 5, 2, 2], dtype), 0, 4, 2).tolist() == [3, 2]


def test_times_may_be_nanoseconds() -> None:
    base = 1_790_000_000_000_000_000
    x = base + np.array([0, 300, 1024, 2047, 2048], np.int64)
    assert resample_mean(x, np.arange(5), base, base + 2048, 2).tolist() == [0.5, 3]
    assert resample_mean(x, np.arange(5), base + 512, base + 1024, 2).tolist() == pytest.approx([NAN, 2], nan_ok=True)
