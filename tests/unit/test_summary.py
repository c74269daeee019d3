"""The summary of a recording in a few lines of text."""

from __future__ import annotations

from pathlib import Path

from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop import demo
from zerotop.analysis.reports.headline import summarize_recording
from zerotop.recording.reader import Recording
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Engine, JobEnded, Node
from zerotop_probe.recording.tables import BOUNDARY, SKIPPED
from zerotop_probe.recording.writer import EventWriter

GIB = 1 << 30


def test_the_summary_has_model_pace_and_memory(tmp_path: Path) -> None:
    events = EventWriter(str(tmp_path), make_identity(0))
    batch = {"micro_batch": 4, "gradient_accumulation": 1, "world_size": 2}
    engine = {"model": "tiny", "parameters": 3_400_000, "zero_stage": 2, "offload_optimizer": "cpu", "dtype": "bf16"}
    events.write(0, Engine, **engine, **batch)
    events.close()
    node = EventWriter(str(tmp_path), make_identity(-1))
    node.write(0, Node, gpus=[{"index": 0, "name": "H200", "uuid": "GPU-aa"}], gpu_notice="A notice.")
    node.write(31 * S, JobEnded, exit_code=0, text="The job ended well.")
    node.close()
    for rank in (0, 1):
        spans = [
            make_span(0, 2, "forward"),
            make_span(2, 10, "step", 0, BOUNDARY | SKIPPED),
            make_span(10, 30 - rank, "step", 1, BOUNDARY),
        ]
        write_table(tmp_path, tables.SPANS, make_identity(rank), *spans).close()
        held = [{"time_ns": at * S, "allocated_bytes": GIB, "allocated_peak_bytes": (3 + rank) * GIB} for at in (5, 20)]
        samples = [make_record(tables.ALLOCATOR, **sample) for sample in held]
        write_table(tmp_path, tables.ALLOCATOR, make_identity(rank), *samples, peaks="window").close()
        costs = [
            make_record(tables.PROBE, time_ns=at * S, cost_ns=at * 10**6, boundaries=1, lost=0, errors=0, one_time_ns=S)
            for at in (10, 30)
        ]
        write_table(tmp_path, tables.PROBE, make_identity(rank), *costs).close()
    sizes = {"total_bytes": 8 * GIB, "used_bytes": GIB}
    write_table(tmp_path, tables.GPUS, make_identity(-1), make_record(tables.GPUS, time_ns=30 * S, gpu=0, **sizes)).close()
    assert summarize_recording(read_recording(tmp_path)).splitlines() == [
        "tiny, 3.4 M parameters, ZeRO-2, optimizer on CPU, bf16, batch 4 x 1 x 2 (micro-batch x accumulation x ranks)",
        "2 steps, 1 skipped: median 20.000 s per iteration, slowest 20.000 s at step 1",
        "seconds per phase (mean of 1 step): "
        "data 0.000 + forward 0.000 + backward 0.000 + step 20.000 + other 0.000 = 20.000",
        "peak GPU memory allocated: 4.00 GiB on rank 1 during engine initialization",
        "watching costs 0.10 % of the time, and 1.00 s once; 15 records, 0 lost",
        "GPU 0 H200: 1.00 GiB of 8.00 GiB in use at the end",
        "Step 0 was skipped: its gradients are infinite or NaN.",
        "  -> Look at the batch of this step, and for a division by zero or a logarithm of zero in the loss:"
        " anomaly detection names the operation.",
        "     torch.autograd.set_detect_anomaly(True)",
        "zerotop: A notice.",
        "The job ended well.",
    ]


def test_peaks_before_the_first_step_count() -> None:
    """No step of the demo's recording allocates as much as DeepSpeed's start."""
    lines = summarize_recording(Recording.open(demo.RECORDING_PATH)).splitlines()
    assert "peak GPU memory allocated: 29.92 GiB on rank 0 during engine initialization" in lines


def test_nothing_was_measured(tmp_path: Path) -> None:
    text = summarize_recording(read_recording(tmp_path))
    assert text.startswith("no training was recorded")
    assert "The recording stops here" in text
