"""The command line: exit codes, errors, and a headless job that runs as it would without zerotop."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from recordings import FOLDER, open_recording
from zerotop import commands
from zerotop.cli import main
from zerotop.command_line import _COMMANDS_BY_OTHER_NAME, _list_commands, build_parser
from zerotop.commands.job.job_list import list_ranks
from zerotop.recording.catalog import find_default_folder

ZEROTOP = [sys.executable, "-m", "zerotop"]


def run_zerotop(state: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = os.environ | {"XDG_STATE_HOME": str(state)}
    return subprocess.run([*ZEROTOP, *arguments], check=False, timeout=60, capture_output=True, env=environ)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(commands.__path__) if not module.ispkg])
def test_every_command_module_has_its_function(name: str) -> None:
    assert callable(getattr(importlib.import_module(f"zerotop.commands.{name}"), name))


@pytest.mark.parametrize(
    "arguments",
    [(), ("fly",), ("run",), ("run", "--"), ("run", "--fast", "--", "true"), ("demo", "--steps", "0")],
)
def test_wrong_usage_exits_2_and_says_why(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_zerotop(tmp_path, *arguments)
    assert result.returncode == 2
    assert b"error:" in result.stderr
    assert result.stdout == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "zerotop: error: missing COMMAND"),
        (("--fast",), "zerotop: error: unrecognized arguments: --fast"),
        (("run", "--fast", "true"), "zerotop run: error: unrecognized arguments: --fast"),
        (("--theme", "pink"), "zerotop: error: unrecognized arguments: --theme"),
        (("--versoin",), "zerotop: error: unrecognized arguments: --versoin. Did you mean --version?"),
        (("replay", "x", "--sped=2"), "zerotop replay: error: unrecognized arguments: --sped=2. Did you mean --speed?"),
        (("run",), "zerotop run: error: missing COMMAND: zerotop run COMMAND ..."),
        (("recordings", "--yes"), "zerotop recordings: error: --older-than"),
        (("replya",), "zerotop: error: there is no command 'replya'. Did you mean: zerotop replay?"),
        (("train.py",), "zerotop: error: there is no command 'train.py'. Did you mean: zerotop run -- python train.py?"),
        (("summary", "x"), "zerotop: error: there is no command 'summary'. Did you mean: zerotop findings?"),
        (("ls",), "zerotop: error: there is no command 'ls'. Did you mean: zerotop recordings?"),
        (("xyzzy",), "zerotop: error: there is no command 'xyzzy'. All are in zerotop --help."),
    ],
)
def test_wrong_usage_is_reported_by_the_command_itself(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith(said)
    assert shown.startswith(f"usage: {said.partition(': error')[0]} [-h]")


def test_other_names_are_of_commands_that_exist() -> None:
    known = _list_commands(build_parser())
    assert not _COMMANDS_BY_OTHER_NAME.keys() & known.keys()
    assert {name.split()[0] for name in _COMMANDS_BY_OTHER_NAME.values()} <= known.keys()


def test_options_that_the_help_does_not_show_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("collect", "--port", "1")) == 2  # --parts is for zerotop itself
    assert capsys.readouterr().err.endswith("unrecognized arguments: --port\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "train.py", "--lr", "1"), "'train.py' on the PATH. Did you mean: zerotop run -- python train.py --lr 1?"),
        (("run", "torchrn", "x.py"), "'torchrn' on the PATH. Did you mean: zerotop run -- torchrun x.py?"),
        (("replay", "gone/x"), "There is no recording at gone/x: no such file or folder."),
        (("replay", "--speed", "5000", "x"), "A speed is from 0.25 to 1000, not 5000"),
        (("replay", "--speed", "fast", "x"), "fast is not a speed such as 0.5 or 20"),
        (("sweep", "--model", "nosuch", "--seq-length", "8,16"), "There is no model 'nosuch': give a preset (tiny, "),
        (("sweep", "--micro-batch", "1,2", "--", "x.py", "{micro_batch}"), ". Did you mean: python x.py {micro_batch}?"),
        (("fit", "--micro-batch", "1:8", "x.py"), "arguments: x.py. The job's command goes after --"),
        (("fit", "--seq-length", "-5:10"), "--seq-length: -5 is less than 1"),
        (("fit", "--gpu-memory", "-1GB"), "-1GB is not a size such as 500MB or 2GB"),
        (("fit", "--micro-batch", "1:8", "--set", "a=1"), "zerotop fit --set ... -- COMMAND"),
        (("sweep", "--offload", "nvme_params", "--nvme-path", "gone"), "There is no folder gone to offload to: choose one"),
        (("attach", "999999999"), "Process 999999999 is not "),
        (("detach", str(FOLDER)), " holds no recording: it has no session.json."),
        (
            ("detach", str(FOLDER / "cpu-clean.zerotop")),
            "cpu-clean.zerotop is a packed recording, which belongs to no running job",
        ),
        (("detach", __file__), " is not a recording: it is neither "),
        (("estimate", "tiny", "--gpu-memory", "80"), "80 is not a size such as 500MB or 2GB; did you mean 80GB?"),
    ],
)
def test_mistakes_are_reported_with_what_was_probably_meant(
    command: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("estimate", "lama-8b"), ". Did you mean llama-8b?"),
        (("fit", "--model", "qwen0.5b", "--headless"), ". Did you mean qwen-0.5b?"),
        (("export", str(FOLDER / "cpu-clean.zerotop"), "--table", "stepz"), ". Did you mean steps?"),
    ],
)
def test_names_of_models_and_tables_are_suggested(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], meant: str
) -> None:
    assert main(arguments) != 0
    assert capsys.readouterr().err.endswith(f"{meant}\n")


def test_the_name_of_a_recording_is_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = find_default_folder() / "brisk-otter"
    folder.mkdir(parents=True)
    (folder / "session.json").write_text("{}")
    assert main(["what-if", "brisk-oter"]) == 1
    assert capsys.readouterr().err.endswith("`zerotop recordings` lists them. Did you mean brisk-otter?\n")


def test_a_missing_package_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    assert main(["what-if", str(FOLDER / "z2.zerotop")]) == 1
    sentence = "This needs the Python package polars, which is not installed here: pip install polars"
    assert capsys.readouterr().err == f"zerotop: {sentence}\n"


def test_the_version_is_a_sentence_where_zerotop_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find_nothing)
    assert main(["--version"]) == 0
    assert "not installed as a package" in capsys.readouterr().out


def test_run_needs_no_dashes_before_the_first_word_that_is_no_option(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    code = "import sys; print(sys.argv[1:])"
    options = "--headless", "--recording", str(recording), "--budget", "0.5"
    result = run_zerotop(tmp_path, "run", *options, sys.executable, "-c", code, "--lr", "1e-3", "--headless", "--", "x")
    assert result.returncode == 0, result.stderr
    assert result.stdout == b"['--lr', '1e-3', '--headless', '--', 'x']\n"


def test_an_unknown_command_is_one_sentence_and_leaves_no_recording(tmp_path: Path) -> None:
    result = run_zerotop(tmp_path, "run", "--headless", "--", "no-such-command")
    assert result.returncode == 127
    assert result.stderr == b"zerotop: There is no command 'no-such-command' on the PATH\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_program_leaves_no_recording(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_bytes(b"\x00\x01 neither")
    script.chmod(0o755)
    recording = tmp_path / "recording"
    result = run_zerotop(tmp_path, "run", "--headless", "--recording", str(recording), "--", str(script))
    assert result.returncode == 126
    assert b"neither a program nor a script" in result.stderr
    assert not recording.exists()


def test_a_headless_job_keeps_its_bytes_and_its_exit_code(tmp_path: Path) -> None:
    said = bytes(range(256)) * 3 + b"\rhalf a line"
    code = f"import os, sys; os.write(1, {said!r}); os.write(2, b'oh'); sys.exit(7)"
    recording = tmp_path / "recording"
    arguments = ("run", "--headless", "--recording", str(recording), "--", sys.executable, "-c", code)
    result = run_zerotop(tmp_path, *arguments)
    assert result.returncode == 7
    assert result.stdout == said
    assert result.stderr.startswith(b"oh")
    assert result.stderr.endswith(f"zerotop: recorded in {recording}\n".encode())
    assert (recording / "session.json").is_file()


def test_a_full_recording_directory_is_kept_and_the_recording_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, temporary = tmp_path / "mine", tmp_path / "temporary"
    for folder in (mine, temporary):
        folder.mkdir()
    (mine / "file").write_text("precious")
    monkeypatch.setenv("TMPDIR", str(temporary))
    why = f"Cannot record to {mine}: {mine} exists and is not empty"
    result = run_zerotop(tmp_path, "run", "--recording", str(mine), "--", "sh", "-c", "echo word; exit 7")
    assert (result.returncode, result.stdout) == (7, b"word\n")
    (recording,) = temporary.iterdir()
    assert (recording / "session.json").is_file()
    assert recording.stat().st_mode & 0o077 == 0
    first, *_, last = result.stderr.decode().splitlines()
    assert first == f"zerotop: {why}. Recording to {recording} instead"
    assert last == f"zerotop: recorded in {recording} instead: {why}"
    result = run_zerotop(tmp_path, "run", "--require-recording", "--recording", str(mine), "--", "touch", str(mine / "run"))
    assert result.returncode == 1
    assert result.stderr.decode() == f"zerotop: Not started: {why}. Choose another folder with --recording DIR\n"
    assert [path.name for path in mine.iterdir()] == ["file"]


def test_a_recorded_job_without_a_launcher_is_listed_with_its_age(tmp_path: Path) -> None:
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    arguments = [*ZEROTOP, "run", "--headless", "--", sys.executable, "-c", "print('ready', flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, env=environ, stdin=pipe, stdout=pipe, stderr=pipe) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        listed = json.loads(run_zerotop(tmp_path, "attach", "--json").stdout)
        (recording,) = (tmp_path / "zerotop" / "sessions").iterdir()
        (row,) = [row for row in listed if row["recording"] == recording.name]
        assert row["age_s"] > 0
        assert row["ranks"] == []  # it does not train
        job.communicate(b"\n", timeout=60)


def test_ranks_of_a_recorded_job_are_those_that_reported() -> None:
    recording = open_recording("cpu-clean")
    assert [rank["rank"] for rank in list_ranks(recording)] == [0, 1]
    assert [rank["pid"] for rank in list_ranks(recording)] == [source.pid for source in recording.sources["spans"]]
