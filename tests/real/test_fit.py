"""``zerotop fit`` on jobs that run out of memory beyond a length, and ``zerotop estimate``."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from programs import make_environment, run_zerotop, start_on_terminal
from recordings import FOLDER
from zerotop.demo.finetune import PRESETS
from zerotop.recording.sweeps import read_sweep

SCRIPT = Path(__file__).with_name("loops") / "swept.py"
JOB = ["--", sys.executable, str(SCRIPT), "{longest}", "{seq_length}", "{steps}", "none"]


def test_the_largest_that_fits(tmp_path: Path) -> None:
    options = ["--seq-length", "8:128:8", "--set", "longest=4,44,900", "-o", str(tmp_path / "fit"), "--json"]
    done = run_zerotop(tmp_path, "fit", *options, *JOB)
    assert done.returncode == 1  # the first has none
    result = json.loads(done.stdout)
    assert [(one["largest"], one["failing"], one["is_final"]) for one in result["series"]] == [
        (None, 8, True),
        (40, 48, True),
        (128, None, True),
    ]
    assert result["runs"] == len(read_sweep(tmp_path / "fit").points) <= 13
    assert "[run 1] " in done.stderr.decode()


def test_a_search_goes_on(tmp_path: Path) -> None:
    """With the same settings, and without running a value twice; the runs of both count."""
    options = ["--seq-length", "8:128:8", "--set", "longest=44", "-o", str(tmp_path / "fit"), "--json"]
    first = json.loads(run_zerotop(tmp_path, "fit", *options, "--most-runs", "2", *JOB).stdout)
    assert (first["runs"], first["series"][0]["is_final"]) == (2, False)
    done = run_zerotop(tmp_path, "fit", *options, *JOB)
    result = json.loads(done.stdout)
    (series,) = result["series"]
    assert (series["largest"], series["failing"], series["is_final"]) == (40, 48, True)
    lengths = [point.settings["seq_length"] for point in read_sweep(tmp_path / "fit").points]
    assert len(lengths) == len(set(lengths)) == result["runs"]
    assert done.stderr.count(b"[run ") == len(lengths) - 2
    other = run_zerotop(tmp_path, "fit", *options, *JOB[:-1], "other")
    assert b"holds another sweep" in other.stderr


def test_a_fit_without_a_recorded_step_says_so(tmp_path: Path) -> None:
    options = ["--seq-length", "8:16:8", "--set", "longest=900", "-o", str(tmp_path / "fit"), "--headless"]
    done = run_zerotop(tmp_path, "fit", *options, *JOB)
    assert done.stdout.decode().endswith(
        "\nNo optimizer step was recorded: all that is known is that the job ended without an error.\n"
    )
    broken = ["--", sys.executable, "-c", "raise SystemExit('{seq_length}')"]
    failed = run_zerotop(tmp_path, "fit", "--seq-length", "8:16:8", "--retries", "0", *broken)
    assert "not known" in failed.stdout.decode()  # it crashed: that says nothing of memory


def test_never_more_runs_than_asked_for(tmp_path: Path) -> None:
    options = ["--seq-length", "8:128:8", "--set", "longest=44,50", "-o", str(tmp_path / "fit"), "--most-runs", "3"]
    done = run_zerotop(tmp_path, "fit", *options, *JOB)
    assert len(read_sweep(tmp_path / "fit").points) == 3
    assert "the limit of 3 runs is reached" in done.stdout.decode()


def test_the_screen_shows_what_fits(tmp_path: Path) -> None:
    options = ["fit", "--seq-length", "8:64:8", "--set", "longest=20,44", "-o", str(tmp_path / "fit")]
    with closing(start_on_terminal(tmp_path, *options, *JOB, rows=30, columns=110)) as terminal:
        terminal.wait_for("Largest sequence length", "found", "done")
        terminal.type_keys("q")
        terminal.wait_for("largest seq-length", "48 does not fit", "results.csv")  # printed when the screen has gone
        assert terminal.exit_code() == 0
    assert "[run 1]" not in terminal.text


def test_fit_refuses_to_start_without_a_setting_to_maximize(tmp_path: Path) -> None:
    done = run_zerotop(tmp_path, "fit", "--stage", "2,3")
    assert done.returncode == 2
    assert b"Say what to maximize" in done.stderr


def test_estimates_for_a_preset(tmp_path: Path) -> None:
    done = run_zerotop(
        tmp_path, "estimate", "llama-8b", "--gpus", "8", "--gpu-memory", "80GB", "--seq-length", "2048", "--json"
    )
    result = json.loads(done.stdout)
    options = {(row["stage"], row["offload"]): row for row in result["options"]}
    parameters = result["model"]["model"]["parameters"]
    assert parameters == 8_030_261_248
    assert len(options) == 12
    assert options[0, "none"]["gpu_bytes"] == 16 * parameters
    assert options[3, "none"]["gpu_bytes"] == 2 * parameters
    assert options[2, "optimizer"]["own_estimates"][0]["gpu_bytes"] == 2 * parameters
    assert len(result["deepspeed_estimates"]) == 8
    (loss,) = [moment for moment in options[1, "none"]["memory"]["moments"] if moment["name"] == "loss"]
    rows = {row["name"]: row["bytes"] for row in loss["rows"]}
    assert rows["logits and loss"] == 12 * 128256 * 2048
    text = run_zerotop(tmp_path, "estimate", "llama-8b", "--gpus", "8", "--gpu-memory", "80GB").stdout.decode()
    assert "does not fit" in text
    assert "stage 3, offload_param=cpu, offload_optimizer=cpu, zero_init=1" in text


def test_estimates_for_a_recording_and_a_config_file(tmp_path: Path) -> None:
    recorded = run_zerotop(tmp_path, "estimate", str(FOLDER / "z2-offload.zerotop"), "--json")
    result = json.loads(recorded.stdout)
    options = {(row["stage"], row["offload"]): row["memory"]["allocated"] for row in result["options"]}
    assert options[2, "optimizer"]["likely"] == options[2, "optimizer"]["high"] == 7_970_734_080  # as measured
    text = run_zerotop(tmp_path, "estimate", str(FOLDER / "z2-offload.zerotop")).stdout.decode()
    assert "stage 3 need the size of the largest layer" in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    done = run_zerotop(tmp_path, "estimate", str(tmp_path))
    assert b"not a decoder-only transformer" in done.stderr
    snapshot = tmp_path / "hub" / "hub" / "models--me--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    cached = run_zerotop(
        tmp_path, "estimate", "me/small", "--json", env=make_environment(tmp_path, HF_HOME=str(tmp_path / "hub"))
    )
    assert json.loads(cached.stdout)["model"]["model"]["parameters"] == 3_213_568
    unknown = run_zerotop(tmp_path, "estimate", "no/such-model")  # nothing is downloaded
    assert unknown.returncode == 1
    assert b"There is no model 'no/such-model'" in unknown.stderr


@pytest.mark.parametrize(("recording", "gpus", "tokens"), [("z2-offload", 1, 2048), ("x4-z3", 4, 2048)])
def test_a_recording_gives_hardware_and_batch(tmp_path: Path, recording: str, gpus: int, tokens: int) -> None:
    path = str(FOLDER / f"{recording}.zerotop")
    own = json.loads(run_zerotop(tmp_path, "estimate", path, "--json").stdout)
    assert (own["hardware"]["gpus"], own["hardware"]["nodes"], own["tokens"]) == (gpus, 1, tokens)
    asked = ["--gpus", "2", "--nodes", "3", "--micro-batch", "2"]
    other = json.loads(run_zerotop(tmp_path, "estimate", path, "--json", *asked).stdout)
    assert (other["hardware"]["gpus"], other["hardware"]["nodes"], other["tokens"]) == (2, 3, 1024)


def test_a_frozen_base_has_a_dtype_of_its_own(tmp_path: Path) -> None:
    """LoRA: a base in bf16, adapters in float32."""
    result = json.loads(run_zerotop(tmp_path, "estimate", str(FOLDER / "gpu-lora.zerotop"), "--json").stdout)
    (option,) = (row for row in result["options"] if (row["stage"], row["offload"]) == (0, "none"))
    rows = {row["name"]: row["bytes"] for row in option["memory"]["moments"][0]["rows"]}
    trained = 4_194_304
    assert rows["parameters"] == 4 * trained
    assert rows["frozen parameters"] == 2 * 6_738_415_616
    assert option["gpu_bytes"] == rows["frozen parameters"] + (4 + 4 + 8) * trained
