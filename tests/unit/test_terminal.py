"""What a terminal would show of a program's output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.session.terminal import lines


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", ()),
        (b"one\ntwo\n", ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"10%\r50%\r100%", ("100%",)),
        (b"longer\rab", ("abnger",)),
        (b"a\nb\x1b[A\rX\nY", ("X", "Y")),
        (b"a\nb\nc\x1b[2A\rX", ("X", "b", "c")),
        (b"a\x1b[99A!", ("a!",)),
        (b"a\nb\x1b[A\x1b[B\rc", ("a", "c")),
        (b"gone\r\x1b[Kx", ("x",)),
        (b"gone\x1b[2K\rx", ("x",)),
        (b"abcd\b\b\x1b[1K", ("  cd",)),
        (b"ab\bX", ("aX",)),
        (b"a\tb", ("a       b",)),
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b(B\x1b]8;;u\x1b\\y", ("red xy",)),
        (b"\x00a\x07b\x7f", ("ab",)),
        (b"[red]x[/red]", ("[red]x[/red]",)),
        (b"a\xff\xc3", ("a��",)),
        ("ä█".encode(), ("ä█",)),
        (b"a\n\n\n", ("a",)),
        (b"a\x1b[" + b"9" * 6000 + b"Ab", ("ab",)),
    ],
)
def test_shown(data: bytes, shown: tuple[str, ...]) -> None:
    assert lines(data) == shown


def test_only_the_last_lines() -> None:
    assert lines(b"".join(b"%d\n" % n for n in range(9)), most=3) == ("6", "7", "8")


@given(st.lists(st.sampled_from([b"\x1b", b"[", b"]", b"2", b"A", b"B", b"K", b"\r", b"\n", b"\b", b"x", b"\xff", b";"])))
def test_anything_is_printable(pieces: list[bytes]) -> None:
    assert all(line.isprintable() for line in lines(b"".join(pieces)))
