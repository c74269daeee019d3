"""The probe in this process, put in and taken out again between blocks of steps, and its own measured cost."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loop_cost import make_switch
from probe_cost import shift_clock

from zerotop_probe.inside.hooks.hook_installer import PROBE
from zerotop_probe.recording import tables

# Of the probe itself; the others are those of its device.
_OWN_TICKERS = ("_stack_ticker", "_thread_ticker")


class PacedTask:
    """The task of one of the probe's threads, run at its usual pace and skipped in blocks without the probe.

    A task that waited for the next block with the probe would run many times as often as in training.
    """

    def __init__(self, ticker: Any) -> None:
        self._ticker = ticker
        self._run_task = ticker._task
        self._wait_s = 0.1
        self.is_on = True

    def __call__(self, *position: int) -> float:
        """Return the seconds until the next call."""
        if self.is_on:
            begin_ns = time.thread_time_ns()
            self._wait_s = self._run_task(*position)
            if getattr(self._ticker, "_share", None) is not None:
                self._wait_s = max(self._wait_s, self._ticker._find_rest(time.thread_time_ns() - begin_ns))
        return self._wait_s


class SwitchedProbe:
    """The probe in this process, of either version."""

    def __init__(self, model: Any) -> None:
        self._probe = PROBE
        self._switch = make_switch(SimpleNamespace(model=model))
        self._is_on = True
        self._turned_ns = 0
        self.reset_costs()

    def reset_costs(self) -> None:
        """Forget what the steps so far have cost."""
        self._cost_ns = 0
        self._begin_ns = time.monotonic_ns()
        self._cost_before = self._read_cost(self._probe.meter)

    def turn_hooks(self, is_on: bool) -> None:
        """Put the hooks into this process, or take them out; the probe's threads rest meanwhile."""
        self._switch(is_on)
        recorder, meter = self._probe.recorder, self._probe.meter
        if self._is_on:
            self._cost_ns += self._read_cost(meter) - self._cost_before
        time_ns, cost_ns = time.monotonic_ns(), self._read_cost(meter)
        if is_on and not self._is_on:  # steps without the probe are no time that it may spend
            shift_clock(recorder, time_ns - self._turned_ns, cost_ns - self._cost_before)
            self._shift_stacks(time_ns - self._turned_ns)
        self._is_on, self._cost_before, self._turned_ns = is_on, cost_ns, time_ns
        device = recorder.device if recorder is not None else None
        tickers = getattr(device, "_tickers", None) or [getattr(device, "_ticker", None)]
        for ticker in filter(None, [*tickers, *(getattr(self._probe, name, None) for name in _OWN_TICKERS)]):
            if not isinstance(ticker._task, PacedTask):
                ticker._task = PacedTask(ticker)
            ticker._task.is_on = is_on

    def _shift_stacks(self, passed_ns: int) -> None:
        """Let the sampler of stacks forget a time without the probe, which it would take for a pause."""
        sampler = getattr(self._probe, "_stack_sampler", None)
        if sampler is not None:
            for span in self._probe.recorder.ended:
                span.begin_ns += passed_ns
                span.end_ns += passed_ns
            sampler._seen_end_ns += passed_ns
            sampler._last_look_ns += passed_ns
            sampler._counted = None

    @staticmethod
    def _read_cost(meter: Any) -> int:
        return int(getattr(meter, "total_ns", meter.cost_ns))

    def around_step(self) -> Any:
        return contextlib.nullcontext()  # to look at the probe here would bring it into the processor's caches

    def read_figures(self) -> dict[str, float]:
        """Return the cost as the probe measures itself, a step, and the shares of steps in full detail and with phases."""
        time.sleep(1.0)  # until the sampler has written the records
        details = self._read_details()
        self._switch(True)
        shares = {name: details.count(flag) / len(details) for name, flag in (("full", 0), ("counted", self._counted))}
        return {"measured_us": self._cost_ns / 1000 / len(details), **shares}

    def _read_details(self) -> list[int]:
        """Return the flags of each step recorded since :meth:`reset_costs`: LIGHT and COUNTED."""
        self._counted = getattr(tables, "COUNTED", -1)
        less = getattr(tables, "LIGHT", 0) | max(0, self._counted)  # older versions record all steps in full
        steps = []
        for path in sorted(Path(os.environ["PYTHONZEROTOP_SESSION"]).glob("spans-*.rec")):
            data = path.read_bytes().partition(b"\n")[2]
            data = data[: len(data) // tables.SPANS.record_struct.size * tables.SPANS.record_struct.size]
            steps += [record for record in tables.SPANS.record_struct.iter_unpack(data) if record[8] & tables.BOUNDARY]
        return [record[8] & less for record in steps if record[1] > self._begin_ns]
