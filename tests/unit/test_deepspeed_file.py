"""DeepSpeed configurations with comments, in Hjson and in base64: what DeepSpeed reads, commands read."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop.commands.common.deepspeed_file import read_deepspeed_config
from zerotop.commands.common.errors import Problem

HJSON = """\
# the first run
{
  // numbers, names and text without quotes
  train_micro_batch_size_per_gpu: 4
  "fp16": {"enabled": true, "loss_scale": 0},  # with quotes too
  /* several
     lines */
  zero_optimization: {
    stage: 2
    offload_optimizer: {
      device: cpu
    }
  },
}
"""
SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "loss_scale": 0},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds.hjson"
    path.write_text(HJSON)
    return path


def test_hjson_and_base64_are_read_as_by_deepspeed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = base64.urlsafe_b64encode(HJSON.encode()).decode()
    assert read_deepspeed_config(str(config)) == read_deepspeed_config(encoded) == SETTINGS
    config_module = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config_module, "open", lambda path, mode: io.StringIO(Path(path).read_text()), raising=False)
    for source in (str(config), encoded):
        assert json.loads(json.dumps(config_module.DeepSpeedConfig(source)._param_dict)) == SETTINGS


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, "a": 2}', "it has a twice"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "it has stage twice"),
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("a text", "is not a"),
        ("{}", "is not a JSON object with settings"),
        ("[" * 5000, "is not JSON"),
    ],
)
def test_an_invalid_file_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(Problem, match=sentence):
        read_deepspeed_config(str(tmp_path / "ds.json"))


@pytest.mark.parametrize("source", ["nothing.json", "", "AAAA", "e30=", "\0", "x" * 5000])
def test_neither_a_file_nor_base64(source: str) -> None:
    with pytest.raises(Problem, match=r"Cannot read the DeepSpeed config|is not a JSON object"):
        read_deepspeed_config(source)


def test_commands_read_hjson(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-8b", "--gpus", "8", "--gpu-memory", "80GB", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "micro-batch of 2,048 tokens on each GPU" in lines
    assert [line.split()[:2] for line in lines if line.strip()[:1].isdigit()] == [["2", "optimizer"]]
    # Beyond the config, nothing is wrong with this sweep but that its points are too few.
    options = ["--config", str(config), "--stage", "2", "--steps", "1", "--", "train.py", "{deepspeed}"]
    assert main(["sweep", *options]) != 0
    assert "JSON" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("zero", "row"),
    [
        ('{"stage": 1, "offload_param": {"device": "cpu"}}', ["1", "none"]),
        ('{"stage": 0, "offload_optimizer": {"device": "cpu"}}', ["0", "none"]),
        ('{"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": null}', None),
        ('"auto"', None),
    ],
)
def test_the_row_of_a_config(zero: str, row: list[str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {zero}}}')
    code = main(["estimate", "tiny", "--gpus", "8", "--gpu-memory", "80GB", "--config", str(tmp_path / "ds.json")])
    captured = capsys.readouterr()
    assert code == (0 if row else 1), captured.err
    assert captured.err.count("\n") == (0 if row else 1)
    if row:
        rows = [line.split()[:2] for line in captured.out.splitlines() if line.strip()[:1].isdigit()]
        assert row in rows
