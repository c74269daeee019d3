"""The base of the declared events: immutable objects whose fields are facts read from JSON.

A field is an annotation of a class: ``int``, ``float`` (which admits integers), ``str``, ``bool``, ``dict[str, Any]`` (any
content), ``list[type]``, ``dict[str, type]`` (``dict[int, type]`` if the keys are decimal numbers) or another class of facts
for an object. With ``| None`` the fact may be null or absent, else readers drop an event without it. Annotations are
evaluated only where events are read, which needs Python 3.10.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from zerotop_probe.recording.identity import Identity

Field = tuple[str, Any, bool]
"""The key of a declared fact, its kind, and whether it is required.

A kind is a class, ``[kind]`` for a list or ``{class: kind}`` for a mapping.
"""


class Facts:
    """The facts of an event, or of an object in it. Each is converted when it is first asked for."""

    facts: dict[str, Any]
    """As read from JSON, undeclared ones too, but None where a fact has another type than declared."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.__dict__["facts"] = facts

    if not TYPE_CHECKING:  # which knows the fields from their annotations

        def __getattr__(self, name: str) -> Any:
            field = (_FIELDS.get(type(self)) or read_fields(type(self))).get(name)
            if field is None:
                raise AttributeError(f"{type(self).__name__} has no field {name}")
            key, kind, _ = field
            value = self.facts.get(key)
            if value is not None and kind is not int and kind is not str:  # which most are
                value = _convert(value, kind)
            self.__dict__[name] = value
            return value

    def __bool__(self) -> bool:
        return bool(self.facts)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other)["facts"] == self.facts

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.facts})"


class Event(Facts):
    """A rare fact: when it happened, who wrote it, and the fields that a subclass declares."""

    event_name: ClassVar[str]
    """The class's name in lower case, with ``_`` between words: the name in files."""

    unix_ns: int
    writer: Identity

    def __init__(self, facts: dict[str, Any], unix_ns: int, writer: Identity) -> None:
        self.__dict__.update(facts=facts, unix_ns=unix_ns, writer=writer)

    @property
    def process_key(self) -> tuple[str, int]:
        """Host and pid of the process that it is about: the one that a sampler names, else its writer."""
        pid = getattr(self, "pid", None)
        return self.writer.host, self.writer.pid if pid is None else pid

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__ and not cls.__name__.endswith("Event"):
            cls.event_name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls.__name__)[1:]
            EVENTS[cls.event_name] = cls

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and super().__eq__(other) and other.unix_ns == self.unix_ns

    def __hash__(self) -> int:
        return hash((type(self), self.unix_ns))


class UnknownEvent(Event):
    """An event that this version does not declare."""

    def __init__(self, name: str, facts: dict[str, Any], unix_ns: int, writer: Identity) -> None:
        super().__init__(facts, unix_ns, writer)
        self.__dict__["event_name"] = name


EVENTS: dict[str, type[Event]] = {}
"""The declared events, by name."""

_FIELDS: dict[type[Facts], dict[str, Field]] = {}
_KINDS: dict[tuple[str, str], tuple[Any, bool]] = {}


def read_fields(declared: type[Facts]) -> dict[str, Field]:
    """Return the fields of a class by the name of the attribute, which ends with ``_`` where it would be a keyword."""
    if declared not in _FIELDS:
        classes = [one for one in reversed(declared.__mro__) if one.__module__ not in (__name__, "builtins")]
        texts = {name: (one.__module__, text) for one in classes for name, text in one.__annotations__.items()}
        _FIELDS[declared] = {name: (name.rstrip("_"), *_read_kind(*text)) for name, text in texts.items()}
    return _FIELDS[declared]


def _read_kind(module: str, text: str) -> tuple[Any, bool]:
    """Return the kind of an annotation, and whether it is required."""
    if (module, text) not in _KINDS:
        optional = text.endswith(" | None")
        kind = _simplify(eval(text[: -len(" | None")] if optional else text, vars(sys.modules[module])))
        _KINDS[module, text] = kind, not optional
    return _KINDS[module, text]


def _simplify(kind: Any) -> Any:
    inner = getattr(kind, "__args__", ())
    if not inner:
        return kind
    if kind.__origin__ is list:
        return [_simplify(inner[0])]
    return dict if inner[1] is Any else {inner[0]: _simplify(inner[1])}


def _convert(value: Any, kind: Any) -> Any:
    if isinstance(kind, list):
        return (
            [_convert(one, kind[0]) for one in value] if isinstance(kind[0], type) and issubclass(kind[0], Facts) else value
        )
    if isinstance(kind, dict):
        return {int(key): one for key, one in value.items()} if int in kind else value
    return kind(value) if issubclass(kind, Facts) else value
