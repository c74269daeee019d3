"""What py-spy says about a process, as an event."""

from __future__ import annotations

from typing import Any

import pytest

from zerotop_probe.outside.sampling.stuck.py_spy import read_dump

PID = 71


def make_frame(name: str, path: str, line: int = 0, module: str | None = None) -> dict[str, Any]:
    return {"name": name, "filename": path, "module": module, "line": line}


LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
MAIN = [
    make_frame("clock_nanosleep", LIBC, module=LIBC),
    make_frame("0x7f55d4dadf7a", LIBC, module=LIBC),
    make_frame("sleep", LIBC, module=LIBC),
    make_frame("write", "/venv/lib/python3.11/site-packages/pkg/io.py", 5),
    make_frame("run", "/usr/lib/python3.11/threading.py", 9),
    make_frame("save", "/home/me/run/parts/save.py", 71),
    make_frame("<module>", "/home/me/run/train.py", 90),
    make_frame("__libc_start_main", LIBC, module=LIBC),
]


def make_thread(number: int, frames: list[dict[str, Any]], name: str = "MainThread") -> dict[str, Any]:
    return {"os_thread_id": number, "thread_name": name, "frames": frames}


def test_native_functions_stand_above_the_lines_that_call_them() -> None:
    facts = read_dump([make_thread(72, MAIN[2:4], "Thread-1"), make_thread(PID, MAIN)], PID)
    assert facts is not None
    main, other = facts["stacks"]
    named = [facts["frames"][number] for number in main["frames"]]
    assert (main["call"], other["thread"], "thread" in main) == ("clock_nanosleep", "Thread-1", False)
    assert [(one["file"], one["line"], one["own"]) for one in named] == [
        ("libc.so.6", 0, False),
        ("pkg/io.py", 5, False),
        ("threading.py", 9, False),
        ("parts/save.py", 71, True),
        ("train.py", 90, True),
    ]


def test_a_process_without_python_frames_is_left_out() -> None:
    assert read_dump([make_thread(PID, MAIN[:3])], PID) is None
    assert read_dump([make_thread(72, MAIN)], PID) is None


INTERPRETER = "/usr/lib/libpython3.11.so.1.0"


@pytest.mark.parametrize(
    ("natives", "call", "left"),
    [
        (
            [("0x7f", LIBC), ("PyThread_acquire_lock_timed", INTERPRETER), ("lock_PyThread_acquire_lock", INTERPRETER)],
            "acquire",
            0,
        ),
        ([("clock_nanosleep", LIBC), ("time_sleep", INTERPRETER)], "time.sleep", 0),
        ([("open64", LIBC)], "open", 0),
        ([("__read", LIBC)], "read", 0),
        ([("gc_collect_main", "/usr/bin/python3.11")], "", 0),
        ([("poll", LIBC), ("recv_", "/lib/libnet.so")], "poll", 1),
    ],
)
def test_functions_of_the_interpreter_are_named_as_in_python(natives: list[tuple[str, str]], call: str, left: int) -> None:
    frames = [make_frame(name, path, module=path) for name, path in natives]
    facts = read_dump([make_thread(PID, [*frames, make_frame("main", "/home/me/train.py", 3)])], PID)
    assert facts is not None
    assert (facts["stacks"][0]["call"], len(facts["frames"]) - 1) == (call, left)
