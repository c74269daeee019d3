"""The settings that the what-if dialog changes, without a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zerotop.analysis.formatting import parse_bytes
from zerotop.analysis.sweeps.asked_setting import Changes, WhatIfAnswer, answer_changes
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.regimes import DTYPES, OPTIMIZERS
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES
from zerotop.analysis.sweeps.what_if import name_offload

Value = int | str
RECORDED = "as recorded"
_MOST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its name as an option of ``zerotop what-if``, the recorded value, and its words; none for a number."""

    name: str
    recorded: Value
    words: tuple[Value, ...] = ()

    def step(self, value: Value, direction: int) -> Value:
        """Return the next or previous word, or twice or half a number."""
        if not self.words:
            return max(1, int(value) * 2 if direction > 0 else int(value) // 2)
        place = self.words.index(value) + direction
        return self.words[min(max(0, place), len(self.words) - 1)]


def list_options(base: Baseline) -> Iterator[Option]:
    """Yield the settings that a recording can be asked for."""
    setup, work = base.setup, base.work
    if not setup.is_loop:
        yield Option("stage", setup.stage, (0, 1, 2, 3))
        offload = name_offload(setup)
        yield Option("offload", offload or RECORDED, (*(() if offload else (RECORDED,)), *OFFLOAD_DEVICES))
    yield Option("micro-batch", work.micro_batch)
    if work.sequence:
        yield Option("seq-length", work.sequence)
    yield Option("accumulation", work.accumulation)
    yield Option("gpus", base.gpus)
    yield Option("nodes", base.nodes)
    yield Option("checkpointing", "off" if work.checkpointing == "none" else "on", ("off", "on"))
    yield Option("optimizer", RECORDED, (RECORDED, *OPTIMIZERS))
    yield Option("dtype", RECORDED, (RECORDED, *DTYPES))
    yield Option("memory", RECORDED, (RECORDED, "16GB", "24GB", "32GB", "40GiB", "48GB", "80GiB", "141GB", "180GB"))


@dataclass
class AskedSettings:
    """The chosen values, the highlighted setting, and the answer to them."""

    base: Baseline
    highlighted: int = 0
    _chosen: dict[str, Value] = field(default_factory=dict)  # what differs from the recording, by name
    _typed: str = ""  # digits of the highlighted number

    def __post_init__(self) -> None:
        self.options = tuple(list_options(self.base))

    def read_value(self, option: Option) -> Value:
        """Return the chosen or recorded value."""
        return self._chosen.get(option.name, option.recorded)

    def move(self, rows: int) -> None:
        """Highlight another setting."""
        self.highlighted = min(max(0, self.highlighted + rows), len(self.options) - 1)
        self._typed = ""

    def change(self, direction: int) -> None:
        """Choose the next or previous value of the highlighted setting."""
        option = self.options[self.highlighted]
        self._choose(option, option.step(self.read_value(option), direction))
        self._typed = ""

    def type_digit(self, digit: str) -> bool:
        """Add a digit to the highlighted number. False where it makes no value."""
        option = self.options[self.highlighted]
        typed = digit if option.words else self._typed + digit
        if len(typed) > _MOST_DIGITS or (int(typed) not in option.words if option.words else not int(typed)):
            return False
        self._typed = typed
        self._choose(option, int(typed))
        return True

    def erase_digit(self) -> None:
        """Remove the last digit of the highlighted number; instead of the only one, the next digit is the number."""
        option = self.options[self.highlighted]
        if not option.words:
            self._typed = str(self.read_value(option))[:-1]
            if self._typed:
                self._choose(option, int(self._typed))

    def reset(self) -> None:
        """Choose what was recorded."""
        self._chosen, self._typed = {}, ""

    def _choose(self, option: Option, value: Value) -> None:
        self._chosen.pop(option.name, None)
        if value != option.recorded:
            self._chosen[option.name] = value

    @property
    def command(self) -> str:
        """The same question on the command line."""
        ordered = [(one.name, self._chosen[one.name]) for one in self.options if one.name in self._chosen]
        return shlex.join(["zerotop", "what-if", self.base.name, *(part for n, v in ordered for part in (f"--{n}", str(v)))])

    def answer(self) -> WhatIfAnswer | str:
        """Return the answer, or the sentence of a refusal."""
        changes: Mapping[str, Value] = {name.replace("-", "_"): value for name, value in self._chosen.items()}
        memory = changes.get("memory")
        try:
            asked = Changes(**{name: value for name, value in changes.items() if name != "memory"})  # type: ignore[arg-type]
            return answer_changes(self.base, asked, parse_bytes(str(memory)) if memory else None)
        except NoBaselineError as error:
            return f"{error}."
