"""Processes, their threads and the host are averaged over the same second."""

from __future__ import annotations

import pytest

from recordings import open_recording
from zerotop import demo
from zerotop.analysis.processes.recent_means import WINDOW_NS, find_window
from zerotop.analysis.ranks.threads import ThreadTable
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording


@pytest.fixture(scope="module")
def demo_source() -> RecordingSource:
    return RecordingSource(Recording.open(demo.RECORDING_PATH))


@pytest.mark.parametrize("step", [11, 12, 13])
@pytest.mark.parametrize("after_s", [0.0, 0.7, 1.3])
def test_the_ranks_of_a_host_add_up_to_it(demo_source: RecordingSource, step: int, after_s: float) -> None:
    end_ns = demo_source.find_step_end(step)
    assert end_ns is not None
    view = demo_source.view_at(end_ns + int(after_s * 1e9))
    of_ranks = sum(rank.cores_used for rank in view.ranks)
    assert of_ranks == pytest.approx(view.hosts[0].cores_used, rel=0.15, abs=2)
    table = ThreadTable(demo_source.recording)
    for rank in view.ranks:
        threads = table.threads_at(rank, view.cursor_ns, 20, 500_000_000)
        assert sum(group.cores_used for group in threads.groups) <= rank.cores_used * 1.1 + 0.1
        assert rank.cores_used <= rank.runnable_threads <= rank.thread_count


def test_earlier_threads_are_counted_as_runnable() -> None:
    """A pool of 52 threads ran at the start and had ended later."""
    source = RecordingSource(open_recording("jobs-publish"))
    view = source.view_at(source.find_step_end(279) or 0)
    threads = ThreadTable(source.recording).threads_at(view.ranks[0], view.cursor_ns, 84, 500_000_000)
    assert threads.cores_used.max() > 6
    assert (threads.runnable >= threads.cores_used).all()


def test_the_window_ends_with_the_host_s_sample(demo_source: RecordingSource) -> None:
    recording = demo_source.recording
    (host,) = recording.sources["hosts"]
    tick_ns = int(host.array["time_ns"][40]) + host.offset_ns
    begin_ns, end_ns = find_window(recording.at(tick_ns + 300_000_000), host.host)
    assert end_ns == tick_ns
    assert len(host.between(begin_ns, end_ns)) == 2
    assert tick_ns - WINDOW_NS < begin_ns < tick_ns - 0.9 * WINDOW_NS
    assert find_window(recording.at(tick_ns + 7), "another").end_ns == tick_ns + 7
