"""The fine-tuning script: its presets, how it reads text, and what it says to input that cannot be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from real_jobs import QUICK_PYTHONS
from zerotop import demo
from zerotop.demo import finetune

# Calls the script's main() with each list of arguments, and prints its exit codes: importing torch and the Trainer takes
# seconds each time.
ONE_AFTER_THE_OTHER = """
import json, runpy, sys
script, *runs = sys.argv[1:]
main = runpy.run_path(script, run_name="finetune")["main"]
for arguments in map(json.loads, runs):
    sys.argv = [script, *arguments]
    print(main(), flush=True)
"""


def run_command(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "TMPDIR": str(cwd),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(QUICK_PYTHONS),
    }
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # gpt2 and Qwen2-0.5B share one matrix between the first and the last layer; it is counted once.
    [
        *(("tiny", 3_213_568), ("gpt2", 124_439_808), ("qwen-0.5b", 494_032_768), ("qwen-1.5b", 1_543_714_304)),
        *(("qwen-7b", 7_615_616_512), ("mistral-7b", 7_248_023_552), ("llama-1b", 1_235_814_400)),
        *(("llama-3b", 3_212_749_824), ("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496)),
    ],
)
def test_presets_have_the_size_of_the_real_models(preset: str, parameters: int) -> None:
    import torch

    config = finetune.load_model_config(preset, 512)
    model = finetune.build_model(preset, config, torch.bfloat16, "meta")
    assert model.num_parameters() == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_preset_reads_bytes_as_tokens() -> None:
    assert finetune.make_tokenizer("tiny")("aé") == [97, 0xC3, 0xA9]


def test_default_text_is_the_python_library() -> None:
    texts = finetune.read_texts(None, 100_000)
    assert 100_000 <= sum(map(len, texts)) < 1_000_000
    assert texts[0] == (Path(json.__file__).parent.parent / "__future__.py").read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.txt", "first\nsecond\n"),
        ("rows.jsonl", '{"n": 1, "text": "first"}\n{"n": 2, "text": "second"}\n'),
        ("rows.json", '[{"n": 1, "words": "first"}, {"n": 2, "words": "second"}]'),
        ("rows.csv", "n,text\n1,first\n2,second\n"),
    ],
)
def test_local_files(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert finetune.read_texts([str(tmp_path / name)], 1000) == ["first", "second"]


def test_parquet_and_several_files(tmp_path: Path) -> None:
    import polars

    paths = [str(tmp_path / f"{word}.parquet") for word in ("first", "second")]
    for path in paths:
        polars.DataFrame({"text": [Path(path).stem]}).write_parquet(path)
    assert finetune.read_texts(paths, 1000) == ["first", "second"]


def test_reads_no_more_than_is_needed(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("12345678\n" * 1000)
    assert len(finetune.read_texts([str(tmp_path / "rows.txt")], 80)) == 10


def test_blocks_are_whole_rows_of_the_text(tmp_path: Path) -> None:
    blocks = finetune.make_blocks(["abcdefg", "hij"], finetune.make_tokenizer("tiny"), 4, str(tmp_path))
    assert [bytes(row) for row in blocks["input_ids"]] == [b"abcd", b"efgh"]
    assert blocks["labels"] == blocks["input_ids"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none.txt", "cannot read the data set none.txt:"),
        ("empty.txt", "there is no text in empty.txt"),
        ("broken.json", "cannot read the data set broken.json:"),
    ],
)
def test_bad_data_set(name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.json").write_text('{"text": ')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(finetune.BadInput, match="^" + re.escape(sentence)):
        finetune.read_texts([name], 1000)


def test_bad_model(tmp_path: Path) -> None:
    with pytest.raises(finetune.BadInput, match=r"^--seq-length 4096 is more than the 2048 tokens that tiny"):
        finetune.load_model_config("tiny", 4096)
    with pytest.raises(finetune.BadInput, match=r"^cannot load the model .* \(and it is not a preset"):
        finetune.load_model_config(str(tmp_path), 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "argument --steps: 0 is not a positive whole number"),
        (["--steps", "many"], "argument --steps: many is not a positive whole number"),
        (
            ["--deepspeed", "none.json"],
            "cannot read the DeepSpeed config none.json: No such file or directory",
        ),
        (["--deepspeed", "broken.json"], "the DeepSpeed config broken.json is not JSON: "),
        (["--deepspeed", "list.json"], "the DeepSpeed config list.json is not a JSON object"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    ended = run_command(demo.SCRIPT_PATH, *arguments, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert sentence in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_impossible_settings_end_with_a_sentence(tmp_path: Path) -> None:
    said = {
        ("--dataset", "none"): "cannot read the data set none:",
        ("--dataset", "numbers.csv"): "no column of numbers.csv holds text; its columns are a, b",
        ("--dataset", "short.txt"): "the text fills 0 rows of 256 tokens: too few to train on",
        ("--model", "tinny"): "cannot load the model tinny (and it is not a preset: tiny, gpt2, ",
    }
    (tmp_path / "numbers.csv").write_text("a,b\n1,2\n")
    (tmp_path / "short.txt").write_text("short\n")
    ended = run_command("-c", ONE_AFTER_THE_OTHER, demo.SCRIPT_PATH, *map(json.dumps, said), cwd=tmp_path)
    assert ended.stdout.split() == ["2"] * len(said), ended.stderr
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("finetune.py: ")]
    assert len(sentences) == len(said)
    for sentence, words in zip(sentences, said.values(), strict=True):
        assert words in sentence
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("finetune-*")), "its temporary folder stays behind"
