"""What ``--help`` says: every command has a sentence and examples, and the examples are what they say."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotop import command_line
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.demo import RECORDING_PATH
from zerotop.recording.reader import Recording

README = Path(__file__).parents[2] / "README.md"


def find_commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [action for action in command_line.build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)


def read_pictures() -> list[dict[str, Any]]:
    """What docs/pictures.py takes."""
    pictures = runpy.run_path(str(README.parent / "docs" / "pictures.py"))["PICTURES"]
    return [picture._asdict() for picture in pictures]


def split_words(line: str) -> list[str]:
    """What the shell would give to zerotop."""
    return shlex.split(line.split(" > ")[0].split(" | ")[0], comments=True)[1:]


@pytest.mark.parametrize("name", find_commands())
def test_the_examples_of_a_command(name: str) -> None:
    parser = find_commands()[name]
    assert str(parser.description).endswith(".")
    examples = re.findall(r"^  (zerotop .*)$", str(parser.epilog), re.MULTILINE)
    assert examples
    for example in examples:
        assert command_line.parse_arguments(split_words(example)).name == name


@pytest.mark.parametrize("name", find_commands())
def test_the_help_of_an_option_names_what_it_is(name: str) -> None:
    """Not "of one GPU", whose noun only its author knows, nor a default alone."""
    for action in find_commands()[name]._actions:
        assert action.help == argparse.SUPPRESS or re.match(r"(?!of )[\w'.]", str(action.help)), action.option_strings


def test_every_command_line_in_the_documentation() -> None:
    texts = [path.read_text() for path in (README, *README.parent.glob("docs/*.md"))]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", "\n".join(texts), re.MULTILINE | re.DOTALL)
    lines = [
        line for language, block in blocks if not language for line in block.splitlines() if line.startswith("zerotop ")
    ]
    assert len(lines) > 30
    for line in lines:
        assert command_line.parse_arguments(split_words(line)).name in find_commands()


def test_the_findings_that_the_readme_shows_are_those_of_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^```\n\$ zerotop findings [\w-]+\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    command_line.main(["findings", str(RECORDING_PATH)])
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["attach", "--help"], ["recordings", "--help"]])
@pytest.mark.parametrize(("state", "shown"), [("", "~/.local/state/zerotop/sessions"), ("/a%s", "/a%s/zerotop/sessions")])
def test_help_names_the_folder_of_recordings(command: list[str], state: str, shown: str) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": state, "COLUMNS": "200"}
    said = subprocess.run([sys.executable, "-m", "zerotop", *command], env=environment, capture_output=True, text=True)
    assert shown in said.stdout


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--version"]) == 0
    assert re.fullmatch(r"zerotop \d+\.\d+\S*\n", capsys.readouterr().out)


def test_the_pictures_that_are_shown_are_those_that_can_be_taken_anew() -> None:
    docs = README.parent / "docs"
    taken = (
        {picture["name"] for picture in read_pictures()}
        | {"nodes"}
        | {f"sweep-{sweep.name}" for sweep in (docs / "sweeps").iterdir()}
    )
    shown = set(re.findall(r"docs/([\w-]+)\.svg", README.read_text()))
    for page in ("stories.md", "sweeps.md", "hardware.md"):
        shown |= set(re.findall(r"\(([\w-]+)\.svg\)", (docs / page).read_text()))
    assert shown == taken
    assert {path.stem for path in docs.glob("*.svg")} == taken


@pytest.mark.parametrize("picture", read_pictures(), ids=lambda picture: str(picture["name"]))
def test_findings_and_steps_of_pictures_are_in_their_recordings(picture: dict[str, Any]) -> None:
    recording = Recording.open(picture["recording"])
    if picture["finding"]:
        assert picture["finding"] in {one.name for one in detect_findings(recording, recording.last_written_ns)}
    if picture["step"] >= 0:
        source = RecordingSource(recording)
        assert source.find_step_end(picture["step"]) is not None
