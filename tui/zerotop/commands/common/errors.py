"""Errors that end a command: a sentence for the user and an exit code."""

from __future__ import annotations

FAILED, USAGE = 1, 2


class Problem(Exception):
    """The command cannot be carried out; the text is a sentence for the user."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(sentence)
        self.code = code


def describe_error(error: BaseException) -> str:
    """Return an exception's text without Python's ``[Errno 13]``."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return str(error) or type(error).__name__
