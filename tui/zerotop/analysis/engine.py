"""A job's DeepSpeed engine: which facts of it are read, and how a sentence describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerotop.analysis.formatting import format_count
from zerotop.session.reader import Session
from zerotop_probe.recording import events

_DEVICES = {"cpu": "CPU", "nvme": "NVMe"}
_TEXTS = {"model": "", "dtype": "", "offload_optimizer": "none", "offload_parameters": "none"}
_NUMBERS = ("parameters", "zero_stage", "micro_batch", "gradient_accumulation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A DeepSpeed engine. None and "": not recorded, or there is no engine yet."""

    model: str = ""  # the model's class, or the name in its config
    parameters: int | None = None
    zero_stage: int | None = None  # None without an engine
    offload_optimizer: str = "none"  # "none", "cpu" or "nvme"
    offload_parameters: str = "none"
    dtype: str = ""  # "fp32", "fp16" or "bf16"
    micro_batch: int | None = None
    gradient_accumulation: int | None = None
    ranks: int | None = None  # world size

    def describe_engine(self) -> str:
        """Return a phrase such as ``Llama, 8,030.0 M parameters, ZeRO-2, optimizer on CPU, bf16, batch 2 x 1 x 8 (...)``."""
        if self.zero_stage is None:
            return "no rank has made a DeepSpeed engine"
        offloads = (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters))
        batch = (self.micro_batch, self.gradient_accumulation, self.ranks)
        parts = (
            self.model,
            f"{self.parameters / 1e6:,.1f} M parameters" if self.parameters else "",
            f"ZeRO-{self.zero_stage}",
            *(f"{part} on {_DEVICES.get(device, device)}" for part, device in offloads if device != "none"),
            self.dtype,
            f"batch {' x '.join(map(str, batch))} (micro-batch x accumulation x ranks)"
            if None not in batch
            else format_count(self.ranks, "rank")
            if self.ranks
            else "",
        )
        return ", ".join(part for part in parts if part)


def read_first_engine(session: Session, cursor_ns: int | None = None) -> Mapping[str, Any]:
    """Return the facts of the lowest rank's first engine; empty before there is one."""
    engines = [event for event in session.events_named(events.ENGINE, cursor_ns) if not event.facts.get("engine")]
    return min(engines, key=lambda event: event.rank).facts if engines else {}


def parse_engine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an :class:`Engine` from the facts of an ``engine`` event."""
    texts = {name: facts.get(name) or default for name, default in _TEXTS.items()}
    return {**texts, **{name: facts.get(name) for name in _NUMBERS}, "ranks": facts.get("world_size")}
