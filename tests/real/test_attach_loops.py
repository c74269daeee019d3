"""Attaching to loops without DeepSpeed that run already, in scripts and in Jupyter kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents import wait_for
from loop_runs import LOOPS
from programs import make_environment, run_zerotop
from rank_recordings import Rank
from real_jobs import make_environment as quiet
from zerotop_probe.outside.attaching.probe_entry import enter_processes, leave_processes
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, FAILED

jupyter_client = pytest.importorskip("jupyter_client")

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LIMIT_S = 60
IMPORTS = "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.AdamW(model.parameters())"
TRAIN = """
for _ in range(5):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Enters itself where ``zerotop attach`` often does: in the middle of a forward.
ENTERED_IN_A_FORWARD = """
import sys, torch
from zerotop_probe.inside.hooks.hook_installer import enter
class Entry(torch.nn.Module):
    def forward(self, x):
        if step == 1:
            assert enter(sys.argv[1]) == "entered"
        return x
layers = [torch.nn.Linear(8, 8) for _ in range(10)]
model = torch.nn.Sequential(layers[0], Entry(), *layers[1:])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def has_reported(recording: Path) -> bool:
    return bool(list(recording.glob("events-rank0-*.jsonl")))


def check_steps(rank: Rank, at_least: int) -> None:
    """Whole iterations of two micro-steps, from the first on."""
    steps = rank.select_phases("step")
    assert steps["step"].tolist() == [*range(len(steps))]
    assert len(steps) >= at_least
    assert np_all(steps["flags"] | COUNTED == BOUNDARY | COUNTED)  # of short ones only the end may be recorded
    assert not rank.find_events("probe_error")


def np_all(values: Any) -> bool:
    return bool(values.all())


def test_a_running_loop_is_entered_and_left(tmp_path: Path) -> None:
    recording, end = tmp_path / "recording", tmp_path / "end"
    recording.mkdir()
    command = [sys.executable, str(LOOPS / "steady.py"), str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=quiet(), text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        target = ProcessHandle.from_pid(process.pid)
        assert target is not None
        assert [entry.why_not for entry in enter_processes([target], str(recording))] == [""]
        time.sleep(1)
        assert [entry.why_not for entry in leave_processes([target], str(recording))] == [""]
        wait_for(lambda: '"left"' in next(recording.glob("events-rank0-*")).read_text(), LIMIT_S)
        end.touch()
        steps = int(process.stdout.readline().split()[1])
    assert process.returncode == 0
    rank = Rank(recording, 0)
    check_steps(rank, 10)
    assert len(rank.select_phases("step")) < steps
    assert [event["event"] for event in rank.events[:2]] == ["hello", "entered"]
    assert rank.select_phases("backward")[["step", "micro_step"]].tolist()[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not np_all(rank.spans["flags"] & FAILED)
    (engine,) = rank.find_events("engine")
    assert (engine["model"], engine["optimizer"], engine["parameters"]) == ("Sequential", "AdamW", 8 * 16 + 16 + 16 * 8 + 8)
    assert [event["when"] for event in rank.find_events("tensors")] == [
        "before_backward",
        "before_update",
        "after_update",
        "next_forward",
    ]


def test_layers_of_the_forward_that_was_entered_are_no_models(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENTERED_IN_A_FORWARD, str(tmp_path)]
    subprocess.run(command, env=quiet(), check=True, timeout=LIMIT_S)
    rank = Rank(tmp_path, 0)
    (engine,) = rank.find_events("engine")
    assert (engine["model"], engine["parameters"]) == ("Sequential", 10 * (8 * 8 + 8))
    assert rank.select_phases("forward")["step"].tolist() == rank.select_phases("step")["step"].tolist() == [0, 1, 2, 3]


class Kernel:
    """A Jupyter kernel, its client, and the outputs of its cells."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        variables = quiet() | make_environment(state) | {"JPY_SESSION_NAME": "lora.ipynb"}
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager.kernel_spec.argv[:] = command
        self.manager.start_kernel(env=variables, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)
        pid = self.manager.provisioner.pid
        process = ProcessHandle.from_pid(pid)
        assert process is not None
        self.process = process

    def run_cell(self, cell: str) -> str:
        """Execute a cell; return what it printed, and its error if it had one."""
        printed: list[str] = []

        def note_output(message: Any) -> None:
            content = message["content"]
            printed.append(content.get("text", "") + "\n".join(content.get("traceback", ())))

        self.client.execute_interactive(cell, timeout=LIMIT_S, output_hook=note_output)
        return "".join(printed)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path, tmp_path / "state")
    yield kernel
    kernel.close()


def test_an_idle_kernel_is_listed_and_entered_by_its_next_cell(kernel: Kernel, tmp_path: Path) -> None:
    state, recording = tmp_path / "state", tmp_path / "recording"
    recording.mkdir()
    assert kernel.run_cell(IMPORTS + TRAIN) == ""
    rows = json.loads(run_zerotop(state, "attach", "--json").stdout)
    (row,) = (row for row in rows if row["pid"] == kernel.process.pid)
    assert (row["launcher"], row["script"], row["recording"]) == ("jupyter", "lora.ipynb", None)
    (entry,) = enter_processes([kernel.process], str(recording), patience_s=0.5)
    assert entry.is_pending
    assert entry.why_not == "it is an idle Jupyter kernel, waiting for the next cell"
    assert kernel.run_cell(TRAIN) == ""
    assert kernel.run_cell("raise ValueError") != ""
    assert kernel.run_cell(TRAIN) == ""
    rank = Rank(recording, 0)
    # The first step told that it trains; an exception between two cells changes nothing.
    check_steps(rank, 9)
    assert len(rank.select_phases("step")) == 9
    assert rank.find_events("engine")[0]["model"] == "Linear"


def test_an_extension_records_a_notebook_without_a_terminal(kernel: Kernel, tmp_path: Path) -> None:
    state = tmp_path / "state"
    output = kernel.run_cell("%load_ext zerotop_probe")
    assert "zerotop attach" in output
    assert kernel.run_cell(IMPORTS + TRAIN) == ""
    (row,) = json.loads(run_zerotop(state, "recordings", "--json").stdout)
    assert row["state"] == "live"
    recording = Path(output.split("recorded to ")[1].split(".\n")[0].strip())
    assert has_reported(recording)
    # A child that the notebook forks records nothing.
    child = "import os\npid = os.fork()\nif not pid:\n    exec(train)\n    os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0"
    assert kernel.run_cell(f"train = {TRAIN!r}\n{child}") == ""
    assert kernel.run_cell("%unload_ext zerotop_probe") != ""
    assert kernel.run_cell(TRAIN) == ""
    rank = Rank(recording, 0)
    check_steps(rank, 5)
    assert len(rank.select_phases("step")) == 5
    assert rank.events[-1]["event"] == "left"
    assert os.path.isfile(recording / "session.json")
    assert json.loads(run_zerotop(state, "recordings", "--json").stdout)[0]["state"] != "live"
