"""The last while in pieces: what strips show."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.live_view import Activity, History, LateActivity, Rank
from zerotop.analysis.views.history import PIECE_NS, PIECES, Histories
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import ALLOCATOR, BEGINS, GPUS, PHASE_CODE, PROCESSES, SPANS

GIB = 1 << 30
RANK = Rank(0, "node1", 100, True, LateActivity(Activity), None, 0, 0, 0, 0, 0.0, 0.0, 0)


def history_at(histories: Histories, seconds: float) -> History:
    return histories.history_at(histories.recording.at(BEGIN_NS + int(seconds * S)), [RANK], [("node1", 0)])


def round_last(values: np.ndarray, last: int) -> list[float | None]:
    return [None if math.isnan(value) else round(float(value), 3) for value in values[-last:]]


@pytest.fixture
def recorded_folder(tmp_path: Path) -> Recording:
    """Three seconds of a rank on a GPU: forward for 0.8 s, a step for 1.4 s, and again a forward that goes on."""
    ticks = [0.1 * tick for tick in range(1, 31) if not 20 <= tick < 25]  # the sampler slept for half a second
    write_table(
        tmp_path,
        PROCESSES,
        make_identity(-1),
        *(
            make_record(
                PROCESSES, time_ns=int(t * S), pid=100, rank=0, cores_used=t, rss_bytes=int(t * GIB), shared_bytes=GIB
            )
            for t in ticks
        ),
    ).close()
    write_table(
        tmp_path,
        GPUS,
        make_identity(-1),
        *(make_record(GPUS, time_ns=int(t * S), gpu=0, utilization_percent=10 * t, used_bytes=int(t * GIB)) for t in ticks),
    ).close()
    write_table(
        tmp_path,
        ALLOCATOR,
        make_identity(0),
        *(
            make_record(ALLOCATOR, time_ns=int(t * S), allocated_bytes=size * GIB, reserved_bytes=9 * GIB, device=0)
            for t, size in ((0.55, 2), (0.6, 5), (0.9, 1), (2.2, 3))
        ),
        peaks="window",
    ).close()
    begins = [(0.6, "forward"), (1.4, "step"), (2.8, "forward")]
    write_table(
        tmp_path,
        BEGINS,
        make_identity(0),
        *(make_record(BEGINS, time_ns=int(t * S), step=0, phase=PHASE_CODE[what], depth=0) for t, what in begins),
    ).close()
    write_table(tmp_path, SPANS, make_identity(0), make_span(0.6, 1.4, "forward"), make_span(1.4, 2.8, "step")).close()
    return read_recording(tmp_path)


def test_pieces_of_a_rank(recorded_folder: Recording) -> None:
    rank = history_at(Histories(recorded_folder), 3.05).ranks[0]
    assert round_last(rank.cores_used, 7) == [None, 0.25, 0.7, 1.2, 1.7, None, 2.7]
    assert round_last(rank.rss_bytes / GIB, 3) == [1.9, None, 2.9]
    assert round_last(rank.shared_bytes / GIB, 3) == [1.0, None, 1.0]
    assert rank.phase[-7:] == ("", "", "forward", "forward", "step", "step", "step")


def test_pieces_of_a_gpu(recorded_folder: Recording) -> None:
    gpu = history_at(Histories(recorded_folder), 3.05).gpus["node1", 0]
    assert round_last(gpu.utilization_percent, 3) == [17.0, None, 27.0]
    assert round_last(gpu.used_bytes / GIB, 3) == [1.9, None, 2.9]
    # The highest sample, and where there is none what was held before.
    assert round_last(gpu.allocated_bytes / GIB, 6) == [None, 5.0, 1.0, 1.0, 3.0, 3.0]
    assert round_last(gpu.reserved_bytes / GIB, 6) == [None, 9.0, 9.0, 9.0, 9.0, 9.0]


def test_processes_and_gpus_of_a_node_are_distinguished(tmp_path: Path) -> None:
    """Whichever are asked for, with others on the node, and with a sampler that was started again in between."""
    ticks = [0.1 * tick for tick in range(1, 41)]
    for sampler, seen in ((7, ticks[:12]), (8, ticks[22:])):
        write_table(
            tmp_path,
            PROCESSES,
            make_identity(-1, pid=sampler),
            *(
                make_record(PROCESSES, time_ns=int(t * S), pid=pid, rank=pid - 100, cores_used=pid * t, rss_bytes=pid * GIB)
                for t in seen
                for pid in (103, 99, 100, 250)
            ),
        ).close()
        write_table(
            tmp_path,
            GPUS,
            make_identity(-1, pid=sampler),
            *(
                make_record(GPUS, time_ns=int(t * S), gpu=gpu, utilization_percent=10 * gpu + t, used_bytes=gpu * GIB)
                for t in seen
                for gpu in range(4)
            ),
        ).close()
    histories = Histories(read_recording(tmp_path))
    ranks = [replace(RANK, rank=pid - 100, pid=pid) for pid in (100, 103)]
    gpus = [("node1", 3), ("node1", 1)]
    for end, some in ((2.05, slice(1, 2)), (4.05, slice(2)), (4.05, slice(1))):
        history = histories.history_at(histories.recording.at(BEGIN_NS + int(end * S)), ranks[some], gpus[some])
        means = [0.25, 0.7, 1.1, None, 2.35, 2.7, 3.2, 3.7][: int(2 * end)]
        for rank in ranks[some]:
            found = history.ranks[rank.rank]
            assert round_last(found.cores_used / rank.pid, len(means)) == means
            assert round_last(found.rss_bytes / GIB, len(means)) == [mean and rank.pid for mean in means]
        for key in gpus[some]:
            used = history.gpus[key].used_bytes
            assert round_last(history.gpus[key].utilization_percent - 10 * key[1], len(means)) == means
            assert round_last(used / GIB, len(means)) == [mean and key[1] for mean in means]


def test_a_piece_is_published_when_it_is_over(recorded_folder: Recording) -> None:
    histories = Histories(recorded_folder)
    before, after = history_at(histories, 1.499), history_at(histories, 1.501)
    assert before.end_s == BEGIN_NS / S + 1.0
    assert after.end_s == BEGIN_NS / S + 1.5
    assert round_last(before.ranks[0].cores_used, 2) == [0.25, 0.7]
    assert round_last(after.ranks[0].cores_used, 2) == [0.7, 1.2]
    assert history_at(histories, 1.9) is after


def test_a_cursor_shows_the_same_however_it_is_reached(recorded_folder: Recording) -> None:
    cursors = [0.1 * tick for tick in range(1, 60)]
    on, back = Histories(recorded_folder), Histories(recorded_folder)
    forth = {cursor: history_at(on, cursor) for cursor in cursors}
    for cursor in [*reversed(cursors), 90.0, 3.0, *cursors[::7]]:
        known = forth.get(cursor) or history_at(Histories(recorded_folder), cursor)
        history = history_at(back, cursor)
        np.testing.assert_array_equal(history.ranks[0].cores_used, known.ranks[0].cores_used)
        np.testing.assert_array_equal(history.gpus["node1", 0].allocated_bytes, known.gpus["node1", 0].allocated_bytes)
        assert history.ranks[0].phase == known.ranks[0].phase


def test_times_without_records_are_unknown(tmp_path: Path) -> None:
    recording = read_recording(tmp_path)
    history = Histories(recording).history_at(recording.at(BEGIN_NS), [RANK], [("node1", 0)])
    assert np.isnan(history.ranks[0].cores_used).all()
    assert set(history.ranks[0].phase) == {""}
    assert len(history.ranks[0].phase) == PIECES
    assert history.piece_s == PIECE_NS / S


def test_samples_out_of_order_are_no_error(tmp_path: Path) -> None:
    times = [1, 2, 9, 3, 8, 4, 7, 5, 6, 2, 9, 10]
    rows = [make_record(PROCESSES, time_ns=t * S, pid=100, rank=0, cores_used=t, rss_bytes=GIB) for t in times]
    write_table(tmp_path, PROCESSES, make_identity(-1), *rows).close()
    for end in range(1, 11):
        histories = Histories(read_recording(tmp_path))
        for second in (end, end + 0.5):
            assert len(history_at(histories, second).ranks[0].cores_used) == PIECES
