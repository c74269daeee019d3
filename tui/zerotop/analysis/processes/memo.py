"""What has come to be known by a cursor, as a number: what follows from it alone is computed once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from zerotop.session.reader import Session

Value = TypeVar("Value")
MemoKey = tuple[int, ...]


class CursorMemo(Generic[Value]):
    """The last value for each session, by what it follows from: the events known at a cursor and the files made by then."""

    def __init__(self, tables: Iterable[str]) -> None:
        """``tables``: whose files count."""
        self._tables = tuple(tables)
        self._created_ns: WeakKeyDictionary[Session, tuple[int, list[int]]] = WeakKeyDictionary()
        self._values: WeakKeyDictionary[Session, tuple[MemoKey, Value]] = WeakKeyDictionary()

    def value_at(self, session: Session, cursor_ns: int, compute: Callable[[], Value]) -> Value:
        """The value at the cursor, computed anew where more or less is known than for the last one."""
        key = self._make_key(session, cursor_ns)
        last = self._values.get(session)
        if last is None or last[0] != key:
            last = self._values[session] = key, compute()
        return last[1]

    def _make_key(self, session: Session, cursor_ns: int) -> MemoKey:
        count = sum(len(session.sources[table]) for table in self._tables)
        known = self._created_ns.get(session)
        if known is None or known[0] != count:
            born = sorted(source.created_ns for table in self._tables for source in session.sources[table])
            known = self._created_ns[session] = count, born
        events = bisect_right(session.events, cursor_ns, key=lambda event: event.unix_ns)
        return count, len(session.events), events, bisect_right(known[1], cursor_ns)
