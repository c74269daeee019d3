"""What a job waits for that has not made its engine yet."""

from __future__ import annotations

from zerotop.session.reader import Session
from zerotop_probe.recording import events

_ENGINE = "Waiting for a rank to make its DeepSpeed engine."
_COMPILERS = "DeepSpeed compiles its operators, the first time only: a minute or two. Then it makes its engine."
# Who has waited for a lock loads what the build should have made: it fails when the lock is removed meanwhile.
_LOCK = (
    "The ranks sleep, nothing is compiled, and no process on their node holds {locks}: perhaps they wait without end for a"
    " build of DeepSpeed's operators that was killed. Unless another job builds there, end this one, remove {it} and start"
    " it again."
)


def describe_wait(session: Session, cursor_ns: int) -> str:
    """A sentence, by what was told last."""
    compiling, locked = (session.events_named(name, cursor_ns) for name in (events.COMPILING, events.BUILD_LOCKED))
    if locked and (not compiling or compiling[-1].unix_ns < locked[-1].unix_ns):
        paths = list(dict.fromkeys(event.facts["path"] for event in locked))
        return _LOCK.format(locks=" and ".join(paths), it="it" if len(paths) == 1 else "them")
    return _COMPILERS if compiling else _ENGINE
