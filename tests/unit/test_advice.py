"""What findings of real recordings advise: by what each of them shows, and never what would do harm."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

import pytest

import recordings
from zerotop.analysis.findings import Finding, detect_findings, load_kinds
from zerotop.analysis.findings.support.causes.pause_causes import COLLECTOR
from zerotop.analysis.script_terms import SNAPSHOTS

# Recording, finding, what must be in headline, details, advice and fix together, and what must not.
ADVICE: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    # What fp16 needs: bf16 comes first, and it is the fix.
    ("story", "skipping_ended", ("Train in bf16", 'or set "fp16.initial_scale_power"', "bf16=True"), ()),
    # Every amount says of what it is.
    ("story", "double_spike", ("each GPU would hold", "with gradients and temporaries", "never used"), ()),
    ("story", "crowded_cores", ("compete for 64 cores in the CPU optimizer", "1.10 s of the first"), ("cpu_optimizer",)),
    # The time is in the loop, of which DeepSpeed's timers know nothing.
    ("gpu-slow", "iteration_shift", ("between the phases", "py-spy dump --pid"), ("wall_clock_breakdown",)),
    ("cpu-slow", "iteration_shift", ("between the phases", "py-spy dump --pid"), ("wall_clock_breakdown",)),
    # Twice the tokens in 1.2 times the time is a gain: said, but nothing to mend.
    ("gpu-long", "iteration_shift", ("8192 tokens instead of 4096",), ("group_by_length", "->")),
    ("gpu-long", "memory_step", ("sequences are longer", "of the device are left"), ("max_length", "truncat", "Lower")),
    # The rank is busy between the phases: workers of its loader have no part in it.
    ("held-straggler", "straggler", ("between the phases", "less often", "py-spy dump --pid"), ("num_workers",)),
    ("cpu-straggler", "straggler", ("waits that much longer for data", "workers that load it ahead"), ("py-spy",)),
    # How many workers would help is not known, nor that there is text.
    (
        "cpu-stall",
        "data_stall",
        ("Raise the DataLoader's num_workers, or prepare the data once",),
        ("tokenize",),
    ),
    # PyTorch's error handling is on already, these ranks have no NCCL, and what has gone on shows no stack any more.
    ("cpu-hang", "hung_ranks", ("It went on in step", "zerotop run -- "), ("py-spy", "TORCH_NCCL", "NCCL")),
    ("held-hang", "hung_ranks", ("It went on in step", "zerotop run -- "), ("py-spy", "TORCH_NCCL", "NCCL")),
    ("cpu-stuck", "hung_ranks", ("train.py:38",), ("TORCH_NCCL",)),
    # Nobody is told to kill what may be somebody else's.
    ("gpu-others", "others_on_gpu", ("See whose process it is", "ps -o user,lstart,cmd -p 730"), ("kill",)),
    # With most of the device free nothing needs less memory.
    ("gpu-microscope", "peak_owner", ("12.65 GiB of 140 GiB",), ("lower", "Lower", "gradient_checkpointing")),
    ("z2-oom", "peak_owner", ("per_device_train_batch_size",), ()),
    ("gpu-clean", "estimate_gap", ("DeepSpeed says", "The estimate covers"), ("NCCL_BUFFSIZE",)),
    ("gpu-clean", "first_real_step", ("1.24 GiB of optimizer state",), ("offload", "nvme")),
    ("z2-oom", "first_real_step", ('"offload_optimizer": {"device": "cpu"}',), ()),
    # Nor less host memory while the host has room.
    ("z2-offload", "first_real_step", ("in host memory",), ("nvme",)),
    ("gpu-offload-4", "pinned_overhead", ("rounding up to powers of two",), ("pin_memory",)),
    # The request is named by what it holds.
    ("z2-oom", "out_of_memory", ("as float32 logits over a vocabulary of 151,936 take",), ()),
    ("cpu-dead", "dead_rank", ("signal 9 (SIGKILL)", "auditctl"), ("dmesg",)),
    ("held-crowded", "cores_taken", ("Other processes use 0.9 of 2 cores", "top -b"), ("kill",)),
    ("gpu-leak", "memory_creep", ("32.0 MiB a step on rank 0",), ("loss",)),
]


@cache
def find_all(name: str) -> tuple[Finding, ...]:
    """Return the findings of a recording at its end."""
    recording = recordings.open_recording(name)
    return detect_findings(recording, recording.end_ns)


@pytest.mark.parametrize(("recording", "name", "said", "unsaid"), ADVICE)
def test_findings_give_the_right_advice(recording: str, name: str, said: tuple[str, ...], unsaid: tuple[str, ...]) -> None:
    finding = next(one for one in find_all(recording) if one.name == name)
    text = " ".join((finding.headline, finding.details, finding.advice, finding.fix))
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []


@pytest.mark.parametrize("line", [SNAPSHOTS, COLLECTOR[1]])
def test_lines_to_paste_need_no_names_of_the_script(line: str) -> None:
    assert subprocess.run([sys.executable, "-c", line], check=False).returncode == 0


def test_fixes_name_no_variables_that_scripts_call_otherwise() -> None:
    named = re.compile(r"\b(tokenizer|outputs|state|path|step|loss|dataset|batch)\b|\.\.\.")
    assert [kind.fix for kind in load_kinds().values() if named.search(kind.fix)] == []


def test_one_leak_is_one_finding() -> None:
    for name in ("gpu-leak", "gpu-lines-leak"):
        assert sum(finding.name == "memory_creep" for finding in find_all(name)) == 1
