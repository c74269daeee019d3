"""What a terminal would show of a program's output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.recording.output.ansi import TerminalScreen, trim_rows


def feed_pieces(*pieces: bytes, most: int = 200) -> tuple[str, ...]:
    """What is shown after all pieces came, one after the other."""
    screen = TerminalScreen(most)
    for piece in pieces:
        split = piece.split(b"\n")
        screen.feed_lines(split, [0] * (len(split) - 1))
    return trim_rows(screen.rows, most)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", ()),
        (b"one\ntwo\n", ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"10%\r50%\r100%", ("100%",)),
        (b"longer\rab", ("abnger",)),
        (b"12345678\rabcdef\rxyz\r", ("xyzdef78",)),
        (b"ab\r\rc", ("cb",)),
        ("[█   ]\r[██  ]".encode(), ("[██  ]",)),
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
        (b"a\xff\xc3\n", ("a��",)),
        ("ä█".encode(), ("ä█",)),
        (b"a\n\n\n", ("a",)),
        (b"a\x1b[" + b"9" * 6000 + b"Ab", ("ab",)),
    ],
)
def test_terminal_output_is_cleaned(data: bytes, shown: tuple[str, ...]) -> None:
    assert feed_pieces(data) == shown


def test_only_the_last_lines() -> None:
    assert feed_pieces(b"".join(b"%d\n" % n for n in range(9)), most=3) == ("6", "7", "8")


def test_pieces_may_end_anywhere() -> None:
    data = "loss ä\x1b[1;31m red\x1b]0;title\x07\r█ 5%\nab\x1b[A\rX\tY\x1b[K!\n".encode()
    whole = feed_pieces(data)
    assert whole == ("X 5% ä rY!", "ab")
    for place in range(len(data)):
        assert feed_pieces(data[:place], data[place:]) == whole
    assert feed_pieces(*(data[place : place + 1] for place in range(len(data)))) == whole


def test_an_escape_that_never_ends_holds_nothing_back_for_long() -> None:
    assert feed_pieces(b"\x1b]0;" + b"x" * 600)[0].endswith("xxx")
    assert feed_pieces(b"a\x1b[", b"31mred") == ("ared",)


def test_lines_are_forgotten_in_time() -> None:
    screen = TerminalScreen(10)
    for number in range(1000):
        screen.feed_lines([b"%d" % number, b""], [number])
    assert len(screen.rows) <= 21
    assert screen.rows[-11:] == [*(str(number) for number in range(990, 1000)), ""]
    assert screen.finished_ns[-1] == 999
    assert len(screen.finished_ns) == len(screen.rows) - 1


@given(st.lists(st.sampled_from([b"\x1b", b"[", b"]", b"2", b"A", b"B", b"K", b"\r", b"\n", b"\b", b"x", b"\xff", b";"])))
def test_anything_is_printable(pieces: list[bytes]) -> None:
    assert all(line.isprintable() for line in feed_pieces(*pieces))
