"""What others wrote into a recording reaches the terminal as text: no command passes on an escape or a line of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recordings import FOLDER
from zerotop.cli import main
from zerotop.commands.common.exit_messages import write_messages
from zerotop.recording.packed.packing import unpack_files

ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e\n"
# What readers understand by these is fixed: another value would say nothing.
FIXED = {"event", "table", "role", "host", "boot"}


def append_escapes(value: Any, name: str = "") -> Any:
    """Escapes after every text of an event."""
    if isinstance(value, str):
        return value if name in FIXED else value + ESCAPES
    if isinstance(value, list):
        return [append_escapes(each, name) for each in value]
    return {key: append_escapes(each, key) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.fixture(scope="module")
def hostile_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings, unpacked, in whose events somebody has written these."""
    root = tmp_path_factory.mktemp("sessions")
    for recording in ("z2-oom", "gpu-microscope", "cpu-dead"):
        (root / recording).mkdir()
        for name, content in unpack_files(FOLDER / f"{recording}.zerotop").items():
            if name.endswith(".jsonl"):
                head, *lines = content.splitlines()
                content = b"\n".join([head, *(json.dumps(append_escapes(json.loads(line))).encode() for line in lines), b""])
            (root / recording / name).write_bytes(content)
        (root / recording / f"odd{ESCAPES}").touch()
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("recording", ["z2-oom", "gpu-microscope", "cpu-dead"])
@pytest.mark.parametrize("command", ["findings", "memory", "microscope", "compare", "pack", "export"])
def test_a_hostile_recording(
    hostile_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, recording: str
) -> None:
    path = str(hostile_folders[recording])
    to = ["-o", str(tmp_path / f"made{ESCAPES}")]
    more = {"compare": [path], "pack": to, "export": to}
    main([command, path, *more.get(command, [])])
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert output
    assert all(character.isprintable() or character == "\n" for character in output), output


def test_errors_are_two_printable_lines(capfd: pytest.CaptureFixture[str]) -> None:
    main(["replay", f"no{ESCAPES}such"])
    write_messages(f"worker-2 takes no part: {ESCAPES}")
    errors = capfd.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in errors), errors
    assert len(errors.splitlines()) == 2
