"""Out of memory: what an error's text says, what the recording knows, and the cause that follows from the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_recording import OOM, PlantedRecording, gib_to_bytes, make_reading, make_record, record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.failures.oom_evidence import OomCase
from zerotop.analysis.failures.oom_log_parser import parse_output
from zerotop.analysis.failures.oom_reasons import choose_verdict
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.memory.allocator_settings import parse_settings
from zerotop.analysis.reports.verdict import describe_memory
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import PHASE_CODE


def mib_to_bytes(amount: float) -> int:
    return round(amount * 2**20)


ADVICE = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
# Sentences as people have reported them, with what is in them.
REAL: list[tuple[str, dict[str, Any]]] = [
    (  # torch 1.9, github.com/pytorch/pytorch/issues/59778
        "RuntimeError: CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already"
        " allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)",
        {
            "kind": "cuda",
            "device": 0,
            "requested_bytes": gib_to_bytes(2.26),
            "total_bytes": gib_to_bytes(6),
            "allocated_bytes": mib_to_bytes(781.59),
            "free_bytes": gib_to_bytes(3.03),
            "reserved_bytes": gib_to_bytes(1.24),
            "process_bytes": None,
        },
    ),
    (  # torch 2.0
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity;"
        " 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch) If reserved memory is >>"
        " allocated memory try setting max_split_size_mb to avoid fragmentation.",
        {
            "requested_bytes": gib_to_bytes(10.73),
            "free_bytes": 0,
            "reserved_bytes": gib_to_bytes(19.15),
            "unallocated_bytes": gib_to_bytes(1.95),
        },
    ),
    (  # torch 2.1, which could not spell
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00"
        " GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is"
        " reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        " max_split_size_mb to avoid fragmentation.",
        {
            "total_bytes": gib_to_bytes(6),
            "free_bytes": 0,
            "allocated_bytes": gib_to_bytes(2.93),
            "unallocated_bytes": gib_to_bytes(2.3),
            "others": (),
        },
    ),
    (  # torch 2.1 in a container: the process that is named is the rank itself
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of"
        " 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory"
        " 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated.",
        {"process_bytes": gib_to_bytes(14.52), "others": (), "free_bytes": mib_to_bytes(235.06)},
    ),
    (  # torch 2.6, three processes on one GPU
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 23.64 GiB of"
        " which 264.00 MiB is free. Process 2086283 has 419.48 MiB memory in use. Including non-PyTorch memory, this process"
        " has 8.04 GiB memory in use. Process 2797307 has 14.85 GiB memory in use. Of the allocated memory 7.63 GiB is"
        f" allocated by PyTorch, and 40.11 MiB is reserved by PyTorch but unallocated. {ADVICE} fragmentation.",
        {
            "requested_bytes": mib_to_bytes(86),
            "process_bytes": gib_to_bytes(8.04),
            "others": ((2086283, mib_to_bytes(419.48)), (2797307, gib_to_bytes(14.85))),
        },
    ),
    (  # torch 2.5 with CUDA graphs
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 546.00 MiB. GPU 1 has a total capacity of 15.77"
        " GiB of which 514.19 MiB is free. Process 562167 has 15.25 GiB memory in use. Of the allocated memory 13.73"
        " GiB is allocated by PyTorch, with 46.00 MiB allocated in private pools (e.g., CUDA Graphs), and 736.86 MiB is"
        f" reserved by PyTorch but unallocated. {ADVICE} fragmentation.",
        {"device": 1, "private_bytes": mib_to_bytes(46), "reserved_bytes": gib_to_bytes(13.73) + mib_to_bytes(736.86)},
    ),
    (  # broken into lines, as people paste it
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 304.00 MiB.\nGPU 0 has a total capacity of 94.97"
        " GiB of which 218.81 MiB is free.\nIncluding non-PyTorch memory, this process has 93.84 GiB memory in use.\nOf"
        " the allocated memory 91.19 GiB is allocated by PyTorch, with 118.00 MiB\nallocated in private pools (e.g.,"
        " CUDA Graphs), and 744.36 MiB is reserved by\nPyTorch but unallocated.\n\nEngineCore then died",
        {
            "requested_bytes": mib_to_bytes(304),
            "process_bytes": gib_to_bytes(93.84),
            "reserved_bytes": gib_to_bytes(91.19) + mib_to_bytes(744.36),
        },
    ),
    (  # torch 2.3.0 breaks off, github.com/pytorch/pytorch/issues/126766
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU \n",
        {"requested_bytes": mib_to_bytes(20), "device": None, "free_bytes": None, "unallocated_bytes": None},
    ),
    (  # a fraction of the device, torch 2.4
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of"
        " 79.10 GiB of which 70.31 GiB is free. 7.91 GiB allowed; Of the allocated memory 6.50 GiB is allocated by"
        " PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated.",
        {"rank": 3, "device": 3, "allowed_bytes": gib_to_bytes(7.91), "free_bytes": gib_to_bytes(70.31)},
    ),
    (  # torch 2.11, this repository's own recording of an H200
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 92.73 GiB. GPU 0 has a total capacity"
        " of 139.80 GiB of which 74.01 GiB is free. Including non-PyTorch memory, this process has 65.78 GiB memory in"
        " use. Of the allocated memory 53.15 GiB is allocated by PyTorch, and 10.97 GiB is reserved by PyTorch but"
        " unallocated. If reserved but unallocated memory is large try setting"
        " PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        {
            "rank": 0,
            "requested_bytes": gib_to_bytes(92.73),
            "process_bytes": gib_to_bytes(65.78),
            "unallocated_bytes": gib_to_bytes(10.97),
        },
    ),
    (
        "RuntimeError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 2 has a total capacity of 63.98 GiB of which"
        " 512.00 MiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by"
        " PyTorch but unallocated.",
        {"kind": "cuda", "device": 2, "free_bytes": mib_to_bytes(512)},
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        {"kind": "cuda", "requested_bytes": None},
    ),
    (  # github.com/NVIDIA/nccl/issues/962
        "node:2134736:2285781 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "node:2134736:2285781 [0] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1296, internal error",
        {"kind": "nccl", "requested_bytes": 6291456},
    ),
    (
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 2432 bytes",
        {"kind": "nccl", "requested_bytes": 2432},
    ),
    ("ins-7:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 2 'out of memory'", {"kind": "nccl"}),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"kind": "cublas", "requested_bytes": None},
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
        {"kind": "host", "requested_bytes": 132426121216},
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to"
        " allocate 4009910272 bytes.",
        {"kind": "host", "requested_bytes": 4009910272},
    ),
    (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 1.50 GiB for an array with shape (3, 4)",
        {"kind": "host", "requested_bytes": gib_to_bytes(1.5)},
    ),
    ("torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be", {"kind": "cuda_driver"}),
    (  # github.com/deepspeedai/DeepSpeed/issues/3232
        "[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py'] exits with"
        " return code = -9",
        {"kind": "killed"},
    ),
    ("  exitcode  : -9 (pid: 438)\n  traceback : Signal 9 (SIGKILL) received by PID 438", {"kind": "killed"}),
]


@pytest.mark.parametrize(("text", "expected"), REAL)
def test_real_sentences(text: str, expected: dict[str, Any]) -> None:
    output = parse_output(f"Epoch 1: 10%\nTraceback (most recent call last):\n{text}\nmore output\n")
    assert output is not None
    assert {name: getattr(output, name) for name in expected} == expected
    assert output.text in " ".join(text.split()) or " ".join(text.split()).startswith(output.text)


@pytest.mark.parametrize(
    "text", ["", "loss 0.1", "out of memory is what we are not", "exits with return code = 0", "return code = -91"]
)
def test_other_output(text: str) -> None:
    assert parse_output(text) is None


def test_pytorchs_sentence_says_more_than_what_followed_from_it() -> None:
    error = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB."
    output = parse_output(f"[rank1]: {error}\nCUDA error: out of memory\nexits with return code = -9\n")
    assert output is not None
    assert (output.kind, output.rank, output.text) == ("cuda", 1, f"[rank1]: {error}")


def test_the_last_of_several() -> None:
    output = parse_output("".join(f"CUDA out of memory. Tried to allocate {size}.00 GiB. GPU 0 has\n" for size in (4, 2, 1)))
    assert output is not None
    assert output.requested_bytes == gib_to_bytes(1)


# --- the post-mortem of a recording --------------------------------------------------------------------------------------


def record_failure(folder: Path, at_s: float = 25, **facts: Any) -> PlantedRecording:
    """The usual recording, whose rank runs out of memory in the backward of step 1."""
    recording = record_two_steps(folder)
    recording.write_event(make_identity(0), at_s, events.OutOfMemory, **(OOM | facts))
    return recording


def require_post_mortem(recording: PlantedRecording, second: float = 40) -> PostMortem:
    post_mortem = find_post_mortem(recording.open_recording().at(BEGIN_NS + int(second * S)))
    assert post_mortem is not None
    return post_mortem


def end_job(recording: PlantedRecording, at_s: float = 30, **facts: Any) -> None:
    usual_end = {"exit_code": 1, "signal": None, "seconds": 30, "oom_kills": 0, "text": "The job failed."}
    recording.write_event(recording.node, at_s, events.JobEnded, **(usual_end | facts))


def test_the_post_mortem_has_the_facts_that_the_rank_recorded(tmp_path: Path) -> None:
    recording = record_failure(tmp_path)
    recording.write_output(
        25.5, "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB. GPU 0 has\n"
    )
    post_mortem = require_post_mortem(recording, 26)
    assert (post_mortem.kind, post_mortem.source, post_mortem.rank, post_mortem.device, post_mortem.failures) == (
        "cuda",
        "rank",
        0,
        0,
        1,
    )
    assert post_mortem.unix_ns == BEGIN_NS + 25 * S
    assert (post_mortem.requested_bytes, post_mortem.free_bytes, post_mortem.limit_bytes) == (
        gib_to_bytes(30),
        gib_to_bytes(20),
        gib_to_bytes(79),
    )
    assert (post_mortem.phase, post_mortem.outer_phase, post_mortem.step, post_mortem.micro_step) == (
        "backward",
        "backward",
        1,
        0,
    )
    assert (post_mortem.rows, post_mortem.sequence, post_mortem.tokens) == (4, 512, 2048)
    assert post_mortem.text.startswith("[rank0]: torch.OutOfMemoryError")
    assert [span.phase for span in post_mortem.spans] == ["forward", "backward", "step", "forward"]


@pytest.mark.parametrize(("printed_s", "is_named"), [(20.5, True), (24.0, False)])
def test_the_finding_names_the_line_that_python_printed(tmp_path: Path, printed_s: float, is_named: bool) -> None:
    """Of an error that the script survives nothing is printed; an exception much later is another one's."""
    recording = record_failure(tmp_path, 20)
    recording.write_output(
        printed_s,
        "Traceback (most recent call last):\n"
        '  File "/home/me/score.py", line 37, in compare\n'
        '    pairs = torch.einsum("qld,pmd->qplm", one, other)\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB.\n",
    )
    (found,) = (
        finding
        for finding in detect_findings(recording.open_recording(), BEGIN_NS + 40 * S)
        if finding.name == "out_of_memory"
    )
    assert ("The error came from score.py:37 in compare." in found.details) is is_named


def test_a_request_that_is_larger_than_the_gpu_needs_no_setting() -> None:
    case = make_case(requested_bytes=gib_to_bytes(211), limit_bytes=gib_to_bytes(140), free_bytes=gib_to_bytes(134))
    assert "larger than the GPU" in choose_verdict(case).advice
    assert "larger" not in choose_verdict(make_case(requested_bytes=gib_to_bytes(139), limit_bytes=gib_to_bytes(140))).advice


def test_a_peak_is_compared_with_what_the_process_may_use(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    limited, free = (
        record_failure(tmp_path / name, limit_bytes=gib_to_bytes(size)).open_recording()
        for name, size in (("a", 60), ("b", 80))
    )
    (text,) = describe_memory(RecordingSource(limited).view_at(None))
    assert "of 60.00 GiB that it may use" in text
    (text,) = describe_memory(RecordingSource(free).view_at(None))
    assert "may use" not in text


def test_whether_the_rank_survived_is_known_later(tmp_path: Path) -> None:
    recording = record_failure(tmp_path, 19.5)
    recording.write_output(19.5, "CUDA out of memory. Tried to allocate 30.00 GiB. GPU 0 has a total capacity of\n")
    assert require_post_mortem(recording, 20).survived is None
    survivor = require_post_mortem(recording, 23.5)
    assert (survivor.survived, survivor.text) == (True, "")


def test_who_ends_after_it_did_not_survive(tmp_path: Path) -> None:
    recording = record_failure(tmp_path, 29.2)
    recording.write_event(make_identity(0), 15, events.OutOfMemory, **(OOM | {"requested_bytes": 1}))
    assert require_post_mortem(recording, 29.5).survived is None
    recording.write_event(recording.node, 29.6, events.RankGone, rank=0, pid=make_identity(0).pid)
    post_mortem = require_post_mortem(recording, 30)
    assert (post_mortem.survived, post_mortem.requested_bytes, post_mortem.failures) == (False, gib_to_bytes(30), 2)


def test_a_forward_may_be_an_evaluations(tmp_path: Path) -> None:
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_engine(micro_batch=4)
    begins = [
        make_record(tables.BEGINS, at, phase=PHASE_CODE[p], depth=d) for at, p, d in ((5, "eval", 0), (6, "forward", 1))
    ]
    recording.write_records(tables.BEGINS, who, begins)
    spans = [
        make_span(6, 7.1, "forward", depth=1, flags=tables.FAILED | tables.EVAL),
        make_span(5, 7.2, "eval", flags=tables.FAILED),
    ]
    recording.write_records(tables.SPANS, who, spans)
    recording.write_event(who, 7, events.OutOfMemory, **(OOM | {"phase": "forward", "rows": 160}))
    post_mortem = require_post_mortem(recording, 8)
    assert (post_mortem.phase, post_mortem.outer_phase, post_mortem.setting) == ("forward", "eval", "batch_size")
    assert [(s.phase, s.failed) for s in post_mortem.spans] == [("eval", True), ("forward", True)]
    assert "Evaluation requested 30.00 GiB with a micro-batch of 160 x 512 tokens; 20.00 GiB of 79" in post_mortem.cause


def make_whole_span(begin_ns: int, end_ns: int, **facts: int) -> tuple[Any, ...]:
    """Return the record of a span with a micro-batch."""
    values = {field.name: 0 for field in tables.SPANS.fields} | {"begin_ns": begin_ns, "end_ns": end_ns} | facts
    return tuple(values.values())


def record_evaluations(recording: PlantedRecording, left: list[float], rows: list[int], **facts: Any) -> None:
    """Add evaluations of four forwards, each of which leaves so many gibibytes; in the last one memory runs out."""
    who, begins, spans, readings = make_identity(0), [], [], []
    for number, (size, count) in enumerate(zip(left, rows, strict=True)):
        at = 10.0 * number + 5
        is_last = number + 1 == len(left)
        begins.append(make_record(tables.BEGINS, at, phase=PHASE_CODE["eval"], step=number))
        readings.append(make_reading(at, 2, 5, phase="eval", edge="begin", step=number))
        for forward in range(1, 5):
            readings.append(make_reading(at + forward, 2 + size * forward, 5, phase="eval", edge="end", step=number))
            batch = {"rows": count, "sequence": 64, "tokens": 64 * count}
            begin_ns, end_ns = int((at + forward - 0.5) * S), int((at + forward) * S)
            of = {"flags": tables.EVAL, "depth": 1, "step": number, "phase": PHASE_CODE["forward"], **batch}
            spans.append(make_whole_span(begin_ns, end_ns, **of))
        spans += [] if is_last else [make_span(at, at + 4, "eval", number)]
    recording.write_engine(micro_batch=4, devices=[{"total_bytes": gib_to_bytes(140)}])
    recording.write_records(tables.BEGINS, who, begins)
    recording.write_records(tables.SPANS, who, spans)
    recording.write_records(tables.ALLOCATOR, who, readings)
    held = {"allocated_bytes": gib_to_bytes(2 + 4 * left[-1]), "requested_bytes": gib_to_bytes(1)}
    usual = OOM | held | {"phase": "eval", "rows": rows[-1], "sequence": 64, "tokens": 64 * rows[-1]}
    recording.write_event(who, at + 4.5, events.OutOfMemory, **(usual | facts))


@pytest.mark.parametrize("limit_gib", [27, 140])
def test_an_evaluation_that_held_more_than_those_before(limit_gib: float, tmp_path: Path) -> None:
    """Its growth is the cause, not the limit of the process, and no line of a healthy evaluation is told."""
    recording = PlantedRecording(tmp_path)
    limits = {"limit_bytes": gib_to_bytes(limit_gib), "free_bytes": gib_to_bytes(110 if limit_gib < 140 else 0.5)}
    record_evaluations(recording, [0.5, 0.5, 6], [8, 8, 8], **limits)
    post_mortem = require_post_mortem(recording)
    assert str(post_mortem.cause).startswith(
        "This evaluation held 26.00 GiB, those before 4.00 GiB, with micro-batches of the same size, 8 x 64 tokens. Each of"
        " its 4 forwards left 6.00 GiB, before 0.50 GiB. Evaluation requested 1.00 GiB; 26.00 GiB"
    )
    assert ("27.00 GiB that the process may use" in str(post_mortem.cause)) is (limit_gib == 27)
    assert "fraction" not in post_mortem.advice + post_mortem.fix
    assert post_mortem.fix == "with torch.no_grad():"


def test_gradients_that_were_enabled_in_an_evaluation(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    graphs = {"forwards": 4, "file": "train.py", "line": 100, "function": "evaluate"}
    record_evaluations(recording, [0.5, 6], [8, 8], evaluation_graphs=graphs)
    post_mortem = require_post_mortem(recording)
    assert "4 forwards of it had gradients enabled, the first at train.py:100 in evaluate." in str(post_mortem.cause)
    assert (post_mortem.advice, post_mortem.setting) == (
        "Run its forwards under torch.no_grad(): they then keep no graph.",
        "torch.no_grad()",
    )


@pytest.mark.parametrize(("left", "rows"), [([6, 6], [8, 8]), ([0.5, 6], [8, 96])])
def test_evaluations_that_held_as_much_or_had_smaller_batches(left: list[float], rows: list[int], tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    record_evaluations(recording, left, rows)
    assert "This evaluation held" not in str(require_post_mortem(recording).cause)


def test_the_micro_batch_of_an_evaluation_is_the_models_input(tmp_path: Path) -> None:
    """A variable of the script has one token more."""
    recording = PlantedRecording(tmp_path)
    record_evaluations(recording, [1, 1], [8, 8], sequence=65, tokens=65 * 8)
    post_mortem = require_post_mortem(recording)
    assert (post_mortem.rows, post_mortem.sequence, post_mortem.tokens) == (8, 64, 512)


@pytest.mark.parametrize(("micro_step", "sequence"), [(None, 64), (0, 65)])
def test_a_variable_of_which_the_script_cuts_a_token(micro_step: int | None, sequence: int, tmp_path: Path) -> None:
    """In a counted step the batch is that of a variable, else it is that of a forward."""
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_engine(micro_batch=8)
    of = {"phase": PHASE_CODE["forward"], "rows": 8, "sequence": 64, "tokens": 512}
    recording.write_records(tables.SPANS, who, [make_whole_span(S, 2 * S, **of)])
    facts = {"phase": "", "micro_step": micro_step, "rows": 8, "sequence": 65, "tokens": 520}
    recording.write_event(who, 5, events.OutOfMemory, **(OOM | facts))
    assert require_post_mortem(recording).sequence == sequence


def test_in_a_counted_step_the_failed_call_tells_the_phase(tmp_path: Path) -> None:
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_engine(micro_batch=4)
    recording.write_records(tables.BEGINS, who, [make_record(tables.BEGINS, 1, phase=PHASE_CODE["step"])])
    counted = tables.BOUNDARY | tables.COUNTED
    spans = [make_span(1, 2, "step", flags=tables.BOUNDARY), make_span(3, 4, "step", 1, flags=counted)]
    recording.write_records(tables.SPANS, who, [*spans, make_span(5.0001, 5.0001, "forward", 2, flags=tables.FAILED)])
    unknown = {"phase": "", "step": 2, "micro_step": None, "rows": None, "sequence": None, "tokens": None}
    recording.write_event(who, 5, events.OutOfMemory, **(OOM | unknown))
    post_mortem = require_post_mortem(recording, 8)
    assert (post_mortem.phase, post_mortem.outer_phase, post_mortem.step) == ("forward", "forward", 2)
    assert "The forward requested 30.00 GiB" in post_mortem.cause
    assert require_post_mortem(recording, 5.00005).phase == ""


def test_nothing_went_wrong(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_output(20, "{'loss': 0.1}\n")
    end_job(recording, exit_code=0)
    assert find_post_mortem(recording.open_recording().at(BEGIN_NS + 40 * S)) is None


def test_a_job_that_failed_otherwise(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_output(20, "ValueError: no\nexits with return code = 1\n")
    end_job(recording)
    assert find_post_mortem(recording.open_recording().at(BEGIN_NS + 40 * S)) is None


def test_nccl_in_the_output(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_output(29, "node:1:2 [0] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n")
    end_job(recording)
    post_mortem = require_post_mortem(recording)
    assert (post_mortem.kind, post_mortem.source, post_mortem.rank, post_mortem.requested_bytes) == (
        "nccl",
        "output",
        0,
        6291456,
    )
    assert post_mortem.survived is False
    assert post_mortem.cause.startswith("NCCL could not allocate 6.0 MiB on the device outside PyTorch's allocator")


def test_an_error_in_the_output_of_one_of_several_ranks(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(rank=1)
    recording.write_records(
        tables.SPANS, make_identity(1), [make_span(20, 23, "forward", 7, flags=tables.FAILED, tokens=2048)]
    )
    error = "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 1.00 GiB is"
    recording.write_output(24, f"[rank1]: {error} free. Of the allocated memory 70.00 GiB is allocated by PyTorch\n")
    end_job(recording)
    post_mortem = require_post_mortem(recording)
    assert (post_mortem.source, post_mortem.rank, post_mortem.phase, post_mortem.step, post_mortem.rows) == (
        "output",
        1,
        "forward",
        7,
        2,
    )
    assert (post_mortem.free_bytes, post_mortem.limit_bytes, post_mortem.allocated_bytes) == (
        gib_to_bytes(1),
        gib_to_bytes(79),
        gib_to_bytes(70),
    )


def memory_of_host(recording: PlantedRecording, *used: float, limit: float = -1, kills: tuple[int, int] = (0, 0)) -> None:
    """A sample each second up to second 30, in gibibytes of 100."""
    rows = [
        make_record(
            tables.HOSTS,
            31 - len(used) + place,
            memory_total_bytes=gib_to_bytes(100),
            memory_available_bytes=gib_to_bytes(100 - amount),
            cgroup_used_bytes=gib_to_bytes(amount),
            cgroup_limit_bytes=gib_to_bytes(limit) if limit > 0 else -1,
            cgroup_oom_kills=kills[0] if place == 0 else kills[1],
        )
        for place, amount in enumerate(used)
    ]
    recording.write_records(tables.HOSTS, recording.node, rows)


def test_the_kernel_killed_for_memory(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(at=1.5, offload_optimizer="cpu")
    memory_of_host(recording, 40, 50, 59.5, limit=60, kills=(2, 3))
    recording.write_event(recording.node, 30.5, events.RankGone, rank=0, pid=make_identity(0).pid)
    post_mortem = require_post_mortem(recording, 31)
    assert (post_mortem.kind, post_mortem.source, post_mortem.rank, post_mortem.oom_kills, post_mortem.survived) == (
        "killed",
        "sampler",
        0,
        1,
        False,
    )
    assert [sample.used_bytes for sample in post_mortem.host_memory] == [
        gib_to_bytes(40),
        gib_to_bytes(50),
        gib_to_bytes(59.5),
    ]
    assert {sample.limit_bytes for sample in post_mortem.host_memory} == {gib_to_bytes(60)}
    assert post_mortem.cause == (
        "The kernel killed 1 process for lack of host memory: 59.50 GiB of 60.00 GiB were in use just before."
    )
    assert post_mortem.setting == "zero_optimization.offload_optimizer.device"


def test_a_rank_killed_while_memory_was_short_and_while_it_was_not(tmp_path: Path) -> None:
    for used, expected in ((99, "killed"), (40, None)):
        folder = tmp_path / str(used)
        folder.mkdir()
        recording = record_two_steps(folder)
        memory_of_host(recording, 30, used)
        recording.write_output(30, "[launch.py:434:sigkill_handler] ['python'] exits with return code = -9\n")
        end_job(recording, 30.5)
        post_mortem = find_post_mortem(recording.open_recording().at(BEGIN_NS + 31 * S))
        assert (post_mortem.kind if post_mortem else None) == expected


def test_more_was_asked_of_the_host_than_it_has(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    memory_of_host(recording, 30, 70)
    recording.write_output(29, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 132426121216 bytes.\n")
    end_job(recording)
    post_mortem = require_post_mortem(recording)
    assert (post_mortem.kind, post_mortem.requested_bytes, post_mortem.limit_bytes) == (
        "host",
        132426121216,
        gib_to_bytes(100),
    )
    assert post_mortem.cause.startswith("123.33 GiB could not be allocated on the host: ")


def test_another_processes_memory(tmp_path: Path) -> None:
    recording = record_failure(
        tmp_path, requested_bytes=gib_to_bytes(22), reserved_bytes=gib_to_bytes(50), inactive_split_bytes=0
    )
    post_mortem = require_post_mortem(recording, 26)
    assert post_mortem.others_bytes == gib_to_bytes(4)
    assert (post_mortem.setting, "other processes hold 4.00 GiB" in post_mortem.cause) == ("CUDA_VISIBLE_DEVICES", True)


# --- causes --------------------------------------------------------------------------------------------------------------


def make_case(**facts: Any) -> OomCase:
    usual_case: dict[str, Any] = {
        "kind": "cuda",
        "requested_bytes": gib_to_bytes(10),
        "limit_bytes": gib_to_bytes(79),
        "total_bytes": gib_to_bytes(79),
        "free_bytes": gib_to_bytes(1),
        "allocated_bytes": gib_to_bytes(70),
        "reserved_bytes": gib_to_bytes(75),
        "largest_free_block_bytes": gib_to_bytes(2),
        "inactive_split_bytes": gib_to_bytes(5),
        "others_bytes": 0,
        "model_states_bytes": gib_to_bytes(20),
        "outer_phase": "backward",
        "torch": "2.8.0",
    }
    return OomCase(**(usual_case | facts | {"engine": EngineFacts(facts.get("engine", {}))}))


ZERO2 = {"zero_stage": 2, "offload_optimizer": "none", "offload_parameters": "none", "micro_batch": 4}
ALL_OFFLOADED = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu", "micro_batch": 1}
EXPANDABLE = parse_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.8")


@pytest.mark.parametrize(
    ("facts", "cause", "setting"),
    [
        (
            {"requested_bytes": gib_to_bytes(4)},
            "PyTorch reserves 5.00 GiB that are unused, but in blocks of at most 2.00 GiB",
            "EXPANDABLE",
        ),
        (
            {"requested_bytes": gib_to_bytes(5.5)},
            "neither 1.00 GiB free on the device nor 5.00 GiB in PyTorch's cache suffice alone",
            "EXPANDABLE",
        ),
        ({"requested_bytes": gib_to_bytes(4), "settings": EXPANDABLE}, "in blocks", "torch.cuda.empty_cache()"),
        ({"others_bytes": gib_to_bytes(12)}, "other processes hold 12.00 GiB of the device", "CUDA_VISIBLE_DEVICES"),
        (
            {"others_bytes": gib_to_bytes(3), "engine": ZERO2},
            "The backward requested 10.00 GiB",
            "train_micro_batch_size_per_gpu",
        ),
        (
            {"limit_bytes": gib_to_bytes(40), "free_bytes": gib_to_bytes(30), "reserved_bytes": gib_to_bytes(39)},
            "may use only 40.00 GiB of its 79.00 GiB",
            "torch.cuda.set_per_process_memory_fraction",
        ),
        ({"engine": ZERO2 | {"micro_batch": 1, "activation_checkpointing": False}}, "requested", "activation checkpointing"),
        ({"engine": ZERO2, "outer_phase": "eval", "rows": 8}, "Evaluation requested", "batch_size"),
        ({"engine": ZERO2, "outer_phase": "step"}, "The update requested", "zero_optimization.offload_optimizer.device"),
        (
            {"engine": ZERO2, "model_states_bytes": gib_to_bytes(60)},
            "requested",
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"engine": ZERO2 | {"offload_optimizer": "cpu"}, "outer_phase": "step"},
            "The update requested",
            "zero_optimization.stage",
        ),
        (
            {"engine": ALL_OFFLOADED | {"offload_parameters": "none"}, "outer_phase": "step"},
            "The update requested",
            "zero_optimization.offload_param.device",
        ),
        ({"engine": ALL_OFFLOADED}, "requested", "max_seq_length"),
        ({"engine": ZERO2, "outer_phase": "init"}, "Engine initialization requested", "zero_optimization.stage"),
        ({"engine": ALL_OFFLOADED, "outer_phase": "init"}, "Engine initialization requested", "deepspeed.zero.Init"),
        (
            {"engine": ALL_OFFLOADED, "outer_phase": "checkpoint_save"},
            "The checkpoint save requested",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
        ({"kind": "nccl", "requested_bytes": 2**20}, "NCCL could not allocate 1.0 MiB", "torch.cuda.empty_cache()"),
        ({"kind": "cublas", "reserved_bytes": gib_to_bytes(70)}, "cuBLAS or cuDNN could not allocate", "max_seq_length"),
        (
            {"kind": "cuda_driver", "requested_bytes": None},
            "A CUDA call could not allocate memory",
            "torch.cuda.empty_cache()",
        ),
        (
            {"kind": "host", "engine": ALL_OFFLOADED},
            "could not be allocated on the host",
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"kind": "killed", "kill_count": 2, "engine": ALL_OFFLOADED, "pinned_spare_bytes": gib_to_bytes(8)},
            "The kernel killed 2 processes",
            "zero_optimization.offload_optimizer.pin_memory",
        ),
        (
            {"kind": "killed", "engine": {"offload_parameters": "cpu"}},
            "killed by SIGKILL",
            "zero_optimization.offload_param.device",
        ),
        ({"kind": "killed", "kill_count": 1, "outer_phase": ""}, "The kernel killed 1 process", "deepspeed.zero.Init"),
        ({"kind": "killed", "kill_count": 1, "outer_phase": "forward"}, "killed 1 process", "num_workers"),
    ],
)
def test_the_cause_follows_from_the_numbers(facts: dict[str, Any], cause: str, setting: str) -> None:
    verdict = choose_verdict(make_case(**facts))
    assert cause in verdict.cause
    assert verdict.setting == setting.replace("EXPANDABLE", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert all(sentence.endswith(".") for sentence in (verdict.cause, verdict.advice))
    assert verdict.setting.split("=")[0] in verdict.advice or verdict.setting in (
        "max_seq_length",
        "activation checkpointing",
    )


def test_a_request_that_grows_with_the_micro_batch() -> None:
    verdict = choose_verdict(
        make_case(requested_bytes=163840 * 607744, tokens=163840, free_bytes=gib_to_bytes(74), engine=ZERO2)
    )
    assert "That is 607,744 bytes for each of the 163,840 tokens of the micro-batch" in verdict.cause
    assert verdict.cause.endswith(", as float32 logits over a vocabulary of 151,936 take.")
    wide = choose_verdict(
        make_case(requested_bytes=163840 * 4 * 57344, tokens=163840, free_bytes=gib_to_bytes(9), engine=ZERO2)
    )
    assert wide.cause.endswith("of the 163,840 tokens of the micro-batch.")  # 56 x 1024: as wide as a layer may be
    assert (
        "tokens" not in choose_verdict(make_case(requested_bytes=163840 * 607744 + 512, tokens=163840, engine=ZERO2)).cause
    )


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "requested_bytes",
                "limit_bytes",
                "total_bytes",
                "free_bytes",
                "allocated_bytes",
                "reserved_bytes",
                "largest_free_block_bytes",
                "others_bytes",
                "model_states_bytes",
            ]
        ),
        st.none() | st.integers(0, 1 << 50),
    ),
    st.sampled_from(["cuda", "cuda_driver", "nccl", "cublas", "host", "killed"]),
    st.sampled_from(["", *tables.PHASES]),
    st.sampled_from([{}, ZERO2, ALL_OFFLOADED]),
)
def test_there_is_always_a_cause_and_an_advice(facts: dict[str, Any], kind: str, phase: str, engine: dict[str, Any]) -> None:
    verdict = choose_verdict(OomCase(kind=kind, outer_phase=phase, engine=EngineFacts(engine), **facts))
    assert verdict.cause
    assert verdict.advice
    assert verdict.setting
    assert "None" not in verdict.cause + verdict.advice + verdict.fix


LOOP = {"kind": "loop"}
BY_TRAINER = {"library": "Trainer", "micro_batch": 8}


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        ({"engine": ZERO2}, '"train_micro_batch_size_per_gpu": 2'),
        ({"engine": ZERO2 | BY_TRAINER}, "per_device_train_batch_size=4"),
        ({"engine": LOOP, "rows": 6}, "batch_size=3"),
        ({"engine": LOOP | BY_TRAINER, "rows": 8}, "per_device_train_batch_size=4"),
        ({"engine": LOOP, "rows": 1, "sequence": 4096}, "truncation=True, max_length=2048"),
        ({"engine": LOOP, "rows": 1}, "fully_shard(model)"),
        ({"engine": LOOP | {"activation_checkpointing": False}, "rows": 1}, "model.gradient_checkpointing_enable()"),
        ({"engine": ZERO2, "outer_phase": "step"}, '"offload_optimizer": {"device": "cpu"}'),
        (
            {"engine": {"zero_stage": 0}, "outer_phase": "step"},
            '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}',
        ),
        ({"engine": ZERO2, "outer_phase": "init"}, '"zero_optimization": {"stage": 3}'),
        ({"engine": ALL_OFFLOADED}, ""),
        ({"engine": ZERO2, "outer_phase": "eval", "rows": 8}, "batch_size=4"),
        ({"engine": ZERO2 | BY_TRAINER, "outer_phase": "eval", "rows": 1}, "eval_accumulation_steps=1"),
        (
            {"engine": LOOP, "outer_phase": "forward", "rows": 8, "tokens": 800, "sequence": 100}
            | {"largest_batch": {"rows": 4, "tokens": 400, "sequence": 100}},
            "batch_size=4",
        ),
        (
            {"engine": LOOP, "outer_phase": "forward", "rows": 4, "tokens": 800, "sequence": 200}
            | {"largest_batch": {"rows": 4, "tokens": 400, "sequence": 100}},
            "input_ids = input_ids[:, :100]",
        ),
        (
            {"engine": LOOP, "outer_phase": "forward", "rows": 400, "tokens": 80000, "sequence": 200}
            | {"largest_batch": {"rows": 4, "tokens": 400, "sequence": 100}},
            "input_ids = input_ids[:4, :100]",
        ),
        ({"kind": "nccl", "requested_bytes": 2**20}, "torch.cuda.empty_cache()"),
        ({"kind": "host", "engine": BY_TRAINER, "outer_phase": "forward"}, "dataloader_num_workers=1"),
        ({"kind": "host", "engine": LOOP, "outer_phase": "forward", "has_workers": False}, ""),
        ({"kind": "host", "engine": LOOP, "outer_phase": "forward"}, "num_workers=1"),
        (
            {"kind": "host", "engine": ALL_OFFLOADED},
            '"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}',
        ),
    ],
    ids=str,
)
def test_the_fix_can_be_copied_into_the_script(facts: dict[str, Any], fix: str) -> None:
    assert choose_verdict(make_case(**facts)).fix == fix
