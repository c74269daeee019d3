"""``doctor --measure``: what is measured and kept, and what becomes of files and programs that are of no use."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotop.cli import main
from zerotop.commands.measuring import figures, measurement
from zerotop.commands.measuring.machine_file import (
    FIGURES,
    MachineFigures,
    MachineFileError,
    find_machine_file,
    read_figures,
    write_figures,
)

KEPT = MachineFigures(
    socket.gethostname(), time.time(), "NVIDIA RTX 6000", "2.9", {"context": 3e8, "nccl": 2e8}, {"adam": "No."}
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return find_machine_file()


def run_program(text: str, limit_s: float = 10.0) -> MachineFigures:
    return measurement.run_measurement(limit_s, [sys.executable, "-c", text])


def test_figures_of_this_machine_are_kept(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["doctor", "--measure"]) == 0
    kept = read_figures(cache)
    assert kept is not None
    assert kept.values["memory_copy"] > 1e8
    assert set(kept.values) | set(kept.reasons) == set(FIGURES)
    text = capsys.readouterr().out
    assert "host memory copy" in text
    assert str(cache) in text
    assert all(reason in text for reason in kept.reasons.values())


def test_the_limit_keeps_what_was_measured() -> None:
    begin = time.monotonic()
    program = "import json, time; print(json.dumps({'name': 'adam', 'value': 5.0}), flush=True); time.sleep(60)"
    found = run_program(program, limit_s=1.5)
    assert time.monotonic() - begin < 10
    assert found.values == {"adam": 5.0}
    assert found.reasons["context"].startswith("The limit of 2 s was over")


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(3)",
        "print('hello')",
        "print('[1]'); print('{')",
        "print('{\"name\": []}')",
        "import os; os.abort()",
        'print(\'{"name": "adam", "value": -1}\')',
        'print(\'{"name": "adam", "value": "much"}\')',
    ],
)
def test_a_program_that_fails_leaves_reasons(text: str) -> None:
    found = run_program(text)
    assert found.values == {}
    assert set(found.reasons) == set(FIGURES)


def collect(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return {line["name"]: line.get("value", line.get("reason")) for line in lines}


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    figures.print_figures()
    found = collect(capsys)
    assert found["memory_copy"] > 1e8
    assert found["adam"] == found["context"] == "This Python has no PyTorch: run it in the training's environment."


def test_a_busy_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, utilization=lambda: 97)
    monkeypatch.setattr(figures, "_checked", [])
    figures._report(("context",), lambda: figures._use_gpu(SimpleNamespace(cuda=cuda)))
    assert collect(capsys)["context"].startswith("The GPU is 97 % busy with another program")


def test_a_failing_library_leaves_the_other_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def measure() -> figures.Figures:
        yield "workspace", 5.0
        raise RuntimeError("CUDA error: out of memory\nmore")

    figures._report(("workspace", "context"), measure)
    assert collect(capsys) == {"workspace": 5.0, "context": "It failed: RuntimeError: CUDA error: out of memory."}


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: Any) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file")
    monkeypatch.setattr(measurement, "run_measurement", lambda: KEPT)
    assert main(["doctor", "--measure"]) == 1
    assert "not kept" in capsys.readouterr().out


def test_no_file_is_no_error(cache: Path) -> None:
    assert read_figures(cache) is None


def damage(**changes: Any) -> str:
    return json.dumps(asdict(KEPT) | changes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read"),
        ("{" * 5000, "cannot be read"),
        (damage()[:40], "cannot be read"),
        ("[]", "another version"),
        (damage(version=0), "another version"),
        (damage(values={"context": "much"}), "damaged"),
        (damage(values={"context": -1}), "damaged"),
        (damage(values={"context": float("nan")}), "damaged"),
        (damage(values={"new": 1}), "damaged"),
        (damage(gpu=None), "damaged"),
        (damage(unix_s="now"), "damaged"),
        (damage(host="another"), "are of another"),
        (damage(unix_s=time.time() - 400 * 86400), "400 days old"),
    ],
    ids=lambda text: "file" if "{" in text else text,  # with the time, no two processes would call a test the same
)
def test_files_of_no_use(cache: Path, content: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    with pytest.raises(MachineFileError, match=reason):
        read_figures(cache)
    assert main(["estimate", "gpt2", "--gpus", "1", "--gpu", "RTX"]) == 0  # and says so
    assert reason in capsys.readouterr().err


def read_context(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["estimate", "gpt2", "--gpus", "2", "--stage", "2", "--offload", "none", "--json", *options]) == 0
    context: dict[str, Any] = json.loads(capsys.readouterr().out)["options"][0]["memory"]["context"]
    return context


def test_estimates_use_what_was_measured(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_context(capsys, "--gpu", "RTX 6000")
    write_figures(KEPT, cache)
    measured = read_context(capsys, "--gpu", "RTX 6000")
    assert measured["likely"] == 5e8 != before["likely"]
    assert "as measured on this machine" in measured["formula"]
    # Another GPU's, or a type that trainings were measured on.
    assert read_context(capsys, "--gpu", "L4") == read_context(capsys, "--gpu-memory", "24GB") == before
    write_figures(replace(KEPT, gpu="NVIDIA H100"), cache)
    assert "H100" in read_context(capsys, "--gpu", "H100")["formula"]
