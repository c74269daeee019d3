"""Orders to the nodes of a collected recording: a file in its folder, whose content the collector puts into its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerotop.commands.common.errors import Problem
from zerotop.recording.atomic_write import write_text_file

_FILE = "orders.json"
NODES_FILE = "nodes.json"
"""Which recording each node of the collected one has: {host: hash}."""
FULL_NODES = 64
"""So many nodes send full detail; of the others, as many that are wanted, and as many whose job has ended."""


def has_nodes(folder: Path) -> bool:
    """Whether parts of other nodes came over the network into this recording."""
    return (folder / NODES_FILE).exists()


_WANTED_FILE = "wanted-nodes.json"
_WANTED_S = 600.0
_MAX_BYTES = 1 << 20
_MAX_ANSWERS_BYTES = 1 << 26


def want_nodes(folder: Path, hosts: Collection[str]) -> None:
    """Ask nodes for full detail during the next ten minutes, where not all send it. Raise OSError."""
    now_s = time.time()
    wanted = _read_times(folder, now_s)
    # Written once a minute at most.
    if any(wanted.get(host, 0.0) < now_s + _WANTED_S - 60.0 for host in hosts):
        write_text_file(folder / _WANTED_FILE, json.dumps(wanted | dict.fromkeys(hosts, now_s + _WANTED_S)))


def read_wanted_nodes(folder: Path) -> Collection[str]:
    """Return the nodes that are asked for full detail."""
    return _read_times(folder, time.time())


def _read_times(folder: Path, now_s: float) -> dict[str, float]:
    try:
        with (folder / _WANTED_FILE).open("rb") as file:
            times = json.loads(file.read(_MAX_BYTES))
        return {host: float(until_s) for host, until_s in times.items() if now_s < float(until_s) <= now_s + _WANTED_S}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def order_stop(folder: Path) -> None:
    """Ask all nodes to stop the job; each further order is the next stronger signal. Raise OSError."""
    write_text_file(folder / _FILE, json.dumps(_read_json(folder / _FILE) | {"stops": count_stops(folder) + 1}))


def count_stops(folder: Path) -> int:
    """Return how often the nodes were asked to stop the job."""
    try:
        return int(_read_json(folder / _FILE)["stops"])
    except (ValueError, KeyError, TypeError):
        return 0


DETACH, MICROSCOPE = "detach", "microscope"
"""Orders that each node carries out once, and answers."""
ORDER_S = 5.0
"""For how long an order is passed on: a node that does not take it by then will not carry it out later."""
WAY_S = 2.0
"""A node takes no order from an answer that it has waited for longer, so that it is known when all is over."""
_ANSWERS_FILE = "order-answers.json"
# A collector sees an order within half a second; then nodes have this time to say that they have taken it.
_HEARD_S, _TAKEN_S = 3.0, ORDER_S + WAY_S
# How long the collector may take from reading an order to writing down who is asked.
_WITHDRAWN_S = 0.5
_DONE_S = 60.0
_POLL_S = 0.1
_NOBODY = "No node was asked: nobody collects this recording now. Start zerotop collect again, or ask on the nodes"


def order_nodes(folder: Path, action: str, **facts: int | bool) -> int:
    """Ask all nodes for something; return the order's number. Raise OSError."""
    number = int(read_order(folder).get("number", 0)) + 1
    order = {"number": number, "action": action, **facts}
    write_text_file(folder / _FILE, json.dumps(_read_json(folder / _FILE) | {"order": order}))
    return number


def read_order(folder: Path) -> dict[str, Any]:
    """Return the last order, {} without one."""
    order = _read_json(folder / _FILE).get("order")
    return order if isinstance(order, dict) and isinstance(order.get("number"), int) else {}


def is_withdrawn(order: Mapping[str, Any]) -> bool:
    """Whether somebody was told that this order was not passed on."""
    return order.get("withdrawn") is True


def _withdraw_order(folder: Path, number: int) -> None:
    order = read_order(folder)
    if order.get("number") == number:
        write_text_file(folder / _FILE, json.dumps(_read_json(folder / _FILE) | {"order": order | {"withdrawn": True}}))


class OrderAnswer(NamedTuple):
    """What a node has answered to an order so far."""

    is_done: bool
    failed: bool = False
    said: tuple[str, ...] = ()


def write_answers(folder: Path, number: int, asked: Collection[str], answers: Mapping[str, OrderAnswer]) -> None:
    """Write down which nodes were asked, and what they answered; the collector does. Raise OSError."""
    said = {host: answer._asdict() for host, answer in answers.items()}
    write_text_file(folder / _ANSWERS_FILE, json.dumps({"number": number, "asked": sorted(asked), "answers": said}))


def await_answers(folder: Path, number: int) -> tuple[list[str], bool]:
    """Wait until the nodes have carried out an order; return sentences, and whether all have.

    Raises Problem if there is no collector that passes it on; then none will do so later. Raises OSError.
    """
    began_s = time.monotonic()
    seen_s: float | None = None  # when the collector had taken note
    withdrawn_s: float | None = None
    asked: list[str] | None = None
    answers: dict[str, OrderAnswer] = {}
    while (now_s := time.monotonic()) - began_s < _DONE_S:
        value = _read_json(folder / _ANSWERS_FILE)
        if value.get("number") == number:
            asked, seen_s = value["asked"], seen_s or now_s
            answers = {host: OrderAnswer(**answer) for host, answer in value["answers"].items()}
        elif withdrawn_s is None and now_s - began_s > _HEARD_S:
            _withdraw_order(folder, number)
            withdrawn_s = now_s
        elif withdrawn_s is not None and now_s - withdrawn_s > _WITHDRAWN_S:
            raise Problem(_NOBODY)
        open_hosts = [] if asked is None else [host for host in asked if host not in answers or not answers[host].is_done]
        is_late = seen_s is not None and now_s - seen_s > _TAKEN_S
        if asked is not None and (not open_hosts or (is_late and not answers.keys() & set(open_hosts))):
            break
        time.sleep(_POLL_S)
    sentences = [f"{host}: {sentence}" for host, answer in sorted(answers.items()) for sentence in answer.said]
    silent = [host for host in asked or () if host not in answers]
    sentences += [f"{host} does not answer. It may have taken the order, and takes none this late." for host in silent]
    late = [host for host, answer in sorted(answers.items()) if not answer.is_done]
    sentences += [f"{host} has taken the order and has not answered within {_DONE_S:.0f} s." for host in late]
    return sentences, not (silent or late or any(answer.failed for answer in answers.values()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_ANSWERS_BYTES))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
