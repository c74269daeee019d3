"""What a whole recording says of a job, by each launcher, against what the job was asked to do."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from config_runs import ACCUMULATE, EVALUATE, RUNS, SAVE, skip_if_impossible_here
from real_jobs import RANKS, SMALL, Run
from zerotop import demo
from zerotop.analysis.reports.export import export_table
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording.tables import PHASE_CODE

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

# The same runs as in test_configs. Plain python is in no entry of RUNS: there it has a test of its own.
CHOSEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero0_bf16": RUNS["zero0_bf16"],
    "zero2_offload_optimizer_bf16": ("python", EVALUATE),
    "zero3_offload_optimizer_bf16": RUNS["zero3_offload_optimizer_bf16"],
    "zero3_bf16": RUNS["zero3_bf16"],  # evaluates, saves and accumulates, all in one
}


@dataclass(frozen=True)
class Recorded:
    """A finished run, its recording, and what was asked of it."""

    config: str
    launcher: str
    options: tuple[str, ...]
    run: Run
    recording: Recording

    @property
    def ranks(self) -> list[int]:
        return list(range(1 if self.launcher == "python" else RANKS))

    def read_option(self, option: str) -> int:
        words = (*SMALL, *self.options)
        return int(words[words.index(option) + 1])

    @property
    def accumulation(self) -> int:
        return self.read_option(ACCUMULATE[0]) if ACCUMULATE[0] in self.options else 1

    def select_spans(self, rank: int, phase: str) -> NDArray[Any]:
        (source,) = [source for source in self.recording.sources["spans"] if source.rank == rank]
        array: NDArray[Any] = source.array
        spans: NDArray[Any] = array[array["phase"] == PHASE_CODE[phase]]
        return spans

    def find_facts(self, event: str) -> list[dict[str, Any]]:
        return [found.facts for found in self.recording.events if found.event_name == event]


@pytest.fixture(params=list(CHOSEN))
def recorded_run(request: pytest.FixtureRequest, finetune_run: Callable[..., Run]) -> Recorded:
    config: str = request.param
    skip_if_impossible_here(config)
    launcher, options = CHOSEN[config]
    run = finetune_run(config, launcher=launcher, options=options)
    assert run.returncode == 0, run.output[-4000:]
    return Recorded(config, launcher, options, run, Recording.open(run.recording))


def test_the_job_ended_well_and_nothing_of_ours_failed(recorded_run: Recorded) -> None:
    (ended,) = recorded_run.find_facts("job_ended")
    assert (ended["exit_code"], ended["signal"]) == (0, None)
    assert not recorded_run.recording.is_live
    assert recorded_run.recording.info["launcher"] == ("" if recorded_run.launcher == "python" else recorded_run.launcher)
    assert recorded_run.recording.damaged_files == 0
    assert (
        not recorded_run.find_facts("probe_error")
        + recorded_run.find_facts("sampler_error")
        + recorded_run.find_facts("rank_silent")
    )


def test_each_rank_says_hello_and_describes_its_engine(recorded_run: Recorded) -> None:
    for name in ("hello", "engine", "goodbye"):
        ranks = [event.writer.rank for event in recorded_run.recording.events if event.event_name == name]
        assert sorted(ranks) == recorded_run.ranks, name
    content = json.loads(demo.find_config(recorded_run.config).read_text())
    zero = content["zero_optimization"]
    expected = {
        "zero_stage": zero["stage"],
        "offload_optimizer": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_parameters": zero.get("offload_param", {}).get("device", "none"),
        "dtype": next(kind for kind in ("bf16", "fp16") if content.get(kind, {}).get("enabled")),
        "micro_batch": recorded_run.read_option("--micro-batch"),
        "gradient_accumulation": recorded_run.accumulation,
        "world_size": len(recorded_run.ranks),
    }
    for engine in recorded_run.find_facts("engine"):
        assert {name: engine[name] for name in expected} == expected


def test_steps_are_those_asked_for(recorded_run: Recorded) -> None:
    table = read_steps(recorded_run.recording)
    count = recorded_run.read_option("--steps")
    expected = [(rank, step) for rank in recorded_run.ranks for step in range(count)]
    assert table[["rank", "step"]].tolist() == expected
    rows = recorded_run.read_option("--micro-batch") * recorded_run.accumulation
    assert table["micro_steps"].tolist() == [recorded_run.accumulation] * len(expected)
    assert table["rows"].tolist() == [rows] * len(expected)
    assert table["tokens"].tolist() == [rows * recorded_run.read_option("--seq-length")] * len(expected)
    assert not table["skipped"].any()
    for column in ("iteration_s", "forward_s", "backward_s", "step_s", "host_rss_bytes"):
        assert np.all(table[column] > 0), column


def test_evaluations_and_checkpoints_are_where_asked(recorded_run: Recorded) -> None:
    for phase, option in (("eval", EVALUATE), ("checkpoint_save", SAVE)):
        for rank in recorded_run.ranks:
            spans = recorded_run.select_spans(rank, phase)
            if option[0] in recorded_run.options:
                assert int(option[1]) in spans["step"], (phase, rank)
                assert np.all(spans["end_ns"] > spans["begin_ns"])
            else:
                assert not len(spans), (phase, rank)


def test_the_sampler_found_all_ranks_with_their_memory(recorded_run: Recorded) -> None:
    pids_found = {facts["rank"]: facts["pid"] for facts in recorded_run.find_facts("rank_found")}
    pids = {event.writer.rank: event.writer.pid for event in recorded_run.recording.events if event.event_name == "hello"}
    assert pids_found == pids
    (processes,) = recorded_run.recording.sources["processes"]
    for rank, pid in pids.items():
        samples = processes.array[(processes.array["rank"] == rank) & (processes.array["pid"] == pid)]
        assert len(samples) > 1, rank
        # The last sample may be of a process that is ending, when the kernel has taken its memory already.
        assert np.all(samples["rss_bytes"][:-1] > 0), rank


def test_the_recorded_output_is_what_the_job_printed(recorded_run: Recorded) -> None:
    printed = (recorded_run.run.folder / "output").read_bytes()
    # Where a machine is busy there may be a finding, which is told before.
    ours = re.search(rb"(^zerotop: [^\n]+\n)+\Z", printed, re.MULTILINE)
    assert ours is not None
    assert ours[0].endswith(f"zerotop: recorded in {recorded_run.run.recording}\n".encode())
    tail = read_output_tail(recorded_run.recording.at(recorded_run.recording.last_written_ns), size=len(printed))
    assert tail == printed[: ours.start()]
    assert f"after {recorded_run.read_option('--steps')} steps".encode() in tail
    assert b"final loss" in tail


def test_exported_steps_are_the_steps(recorded_run: Recorded) -> None:
    table = read_steps(recorded_run.recording)
    stream = io.BytesIO()
    assert export_table(recorded_run.recording, "steps", "csv", stream) == len(table)
    lines = list(csv.DictReader(io.StringIO(stream.getvalue().decode())))
    columns = ["rank", "step", "micro_steps", "rows", "tokens"]
    assert [tuple(int(line[name]) for name in columns) for line in lines] == table[columns].tolist()
