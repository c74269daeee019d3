"""Memoises values derived from the events and files visible at a cursor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from zerotop.session.reader import Session

Value = TypeVar("Value")
MemoKey = tuple[int, ...]


class CursorMemo(Generic[Value]):
    """The last value for each session, recomputed when other events or files are visible at the cursor."""

    def __init__(self, tables: Iterable[str]) -> None:
        """``tables``: the values depend on the files of these tables."""
        self._tables = tuple(tables)
        self._created_ns: WeakKeyDictionary[Session, tuple[int, list[int]]] = WeakKeyDictionary()
        self._values: WeakKeyDictionary[Session, tuple[MemoKey, Value]] = WeakKeyDictionary()

    def value_at(self, session: Session, cursor_ns: int, compute: Callable[[], Value]) -> Value:
        """Return the value at the cursor, computed again when more or less is visible than last time."""
        key = self._make_key(session, cursor_ns)
        last = self._values.get(session)
        if last is None or last[0] != key:
            last = self._values[session] = key, compute()
        return last[1]

    def _make_key(self, session: Session, cursor_ns: int) -> MemoKey:
        count = sum(len(session.sources[table]) for table in self._tables)
        cached = self._created_ns.get(session)
        if cached is None or cached[0] != count:
            created_ns = sorted(source.created_ns for table in self._tables for source in session.sources[table])
            cached = self._created_ns[session] = count, created_ns
        events = bisect_right(session.events, cursor_ns, key=lambda event: event.unix_ns)
        return count, len(session.events), events, bisect_right(cached[1], cursor_ns)
