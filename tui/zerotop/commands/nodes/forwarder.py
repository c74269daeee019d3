"""Sends a node's recording to the collector as it grows, from a process of its own: the job never waits for the network.

The node's own recording is the store: a request is repeated until the collector has written what is in it, and after a
restart of either side the collector says what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerotop.commands.common.errors import describe_error
from zerotop.commands.common.node_orders import WAY_S
from zerotop.commands.nodes import messages
from zerotop.commands.nodes.clocks import Alignment
from zerotop.commands.nodes.link import Connect, Link, LinkError
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import BadMessage, JobKey
from zerotop.commands.nodes.sent_files import Batch, SentFiles
from zerotop_probe.recording.directory import read_recording_info
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

PERIOD_S, REDUCED_PERIOD_S = 0.3, 1.0
"""From one look at the recording's files to the next, with and without full detail."""
BEAT_S = 1.0
"""The longest time without a message."""
ANSWER_S = 10.0
"""How long to wait for an answer."""
_RETRY_S = 0.5
# Round trips to align the clock: more of them while they leave a larger error. Their time has no limit: where the
# collector is slow, few of them leave an error of tens of milliseconds for the whole recording.
_ROUND_TRIPS, _MOST_ROUND_TRIPS = 8, 64
_GOOD_ERROR_NS = 300_000
# While many nodes begin at once none is good for seconds: as many again are spread out until one will do.
_USABLE_ERROR_NS, _BUSY_PAUSE_S = 1_000_000, 0.1
# How often to look whether the job has ended.
_LOOK_S = 1.0
PATIENCE_S = 30.0
"""How long after the end of the job to try without success."""


class Forwarder:
    """Sends one recording. ``tell`` receives sentences for the user."""

    def __init__(
        self,
        folder: str,
        host: str,
        key: JobKey,
        connect: Connect,
        *,
        job: LocalJob,
        tell: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder, self._host, self._key, self._connect = folder, host, key, connect
        self._job, self._tell, self._patience_s = job, tell, patience_s
        self._recording: Any = None  # the collected one, in which orders are numbered
        self._stops: int | None = None  # orders to stop that we know of
        self._order: int | None = None  # the number of the last other order that we know of
        self._obeying: asyncio.Task[None] | None = None
        self._obeyed: dict[str, Any] | None = None  # how far it was carried out, until that was sent
        self._files = SentFiles(folder, host)
        self._is_reduced = False  # the collector wants no full detail now
        self._session = ""
        self._number = 0
        self._alignment: Alignment | None = None
        self._changes: Iterator[Batch] | None = None
        self._batch: Batch = []
        self._sent_s = self._looked_s = 0.0
        self._over_s: float | None = None
        self._told: set[str] = set()

    async def run(self) -> bool:
        """Send until the recording is over; return whether the collector has all of it."""
        while os.path.isdir(self._folder):
            link: Link | None = None
            try:
                link = await self._connect()
                await self._send_all(link)
                return True
            except LinkError as error:
                self._tell_once(f"{error}. This node records to {self._folder} meanwhile")
            except FileNotFoundError:  # the recording was deleted
                continue
            finally:
                if link is not None:
                    await link.close()
            self._look_for_end()
            if self._over_s is not None and time.monotonic() - max(self._over_s, self._sent_s) > self._patience_s:
                return False
            await asyncio.sleep(_RETRY_S)
        return False

    async def _send_all(self, link: Link) -> None:
        if not self._session:
            await self._begin(link)
        is_checked = False
        while True:
            began_s = time.monotonic()
            self._look_for_end()
            is_over = self._over_s is not None
            count = await self._send_changes(link)
            if is_over and not count and not self._is_reduced and not self._is_obeying:
                if is_checked:
                    await self._ask(link, {"kind": messages.BYE})
                    return
                # Once more by the hashes of whole files.
                await self._begin(link)
                is_checked = True
            elif time.monotonic() - self._sent_s > BEAT_S or self._obeyed is not None:
                await self._ask(link, {"kind": messages.WRITE, "changes": []})
            if not is_over or self._is_reduced or self._is_obeying:
                period_s = REDUCED_PERIOD_S if self._is_reduced else PERIOD_S
                await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))

    async def _send_changes(self, link: Link) -> int:
        """Send what is new; return the number of changes. What was not answered is sent again first."""
        count = 0
        if self._changes is None:
            self._changes = self._files.find_changes(reduced=self._is_reduced)
        while self._batch or (batch := next(self._changes, None)) is not None:
            if not self._batch:
                assert batch is not None
                self._batch = batch
                self._number += 1
            header = {"kind": messages.WRITE, "changes": [change for change, _ in self._batch], "number": self._number}
            await self._ask(link, header, b"".join(data for _, data in self._batch))
            count += len(self._batch)
            self._batch = []
        self._changes = None
        return count

    async def _begin(self, link: Link) -> None:
        """Introduce this node and learn what the collector has of it."""
        self._session, self._number, self._changes, self._batch = secrets.token_hex(8), 0, None, []
        info = read_recording_info(self._folder)
        hello: dict[str, Any] = {"kind": messages.HELLO, "format": [FORMAT_MAJOR, FORMAT_MINOR], "info": info}
        listed: list[tuple[str, int, str]] = []
        try:
            self._alignment = self._alignment or await self._align_clock(link)
            hello["alignment"] = self._alignment
            recording = (await self._ask(link, hello)).get("recording")
            if recording != self._recording:
                self._recording, self._stops, self._order, self._obeyed = recording, None, None, None
            while True:
                after = listed[-1][0] if listed else ""
                answer = await self._ask(link, {"kind": messages.LIST, "after": after})
                if answer["files"] is None:  # the collector still hashes its files
                    continue
                page = [(str(name), int(size), str(digest)) for name, size, digest in answer["files"]]
                listed += page
                if not page:
                    break
            await self._compare_files(link, listed)
        except BaseException:
            self._session = ""
            raise

    async def _align_clock(self, link: Link) -> Alignment | None:
        """Return the collector's time by some round trips."""
        best: Alignment | None = None
        last: Alignment | None = None  # by all round trips so far, and by what the clocks may have drifted meanwhile
        for count in range(2 * _MOST_ROUND_TRIPS):
            good_ns = _GOOD_ERROR_NS if count < _MOST_ROUND_TRIPS else _USABLE_ERROR_NS
            if count >= _ROUND_TRIPS and (best is None or best.error_ns <= good_ns):
                break
            if count >= _MOST_ROUND_TRIPS:
                await asyncio.sleep(_BUSY_PAUSE_S)
            asked_ns = time.monotonic_ns()
            answer = await self._ask(link, {"kind": messages.PING})
            if isinstance(unix_ns := answer.get("unix_ns"), int):
                trip = Alignment.from_round_trip(asked_ns, time.monotonic_ns(), unix_ns)
                last = trip if last is None else last.narrow(trip)
                best = last if best is None or last.error_ns < best.error_ns else best
        return best

    async def _compare_files(self, link: Link, listed: list[tuple[str, int, str]]) -> None:
        """Begin with what the collector has; it hears from us while we hash our files."""
        comparing = asyncio.create_task(asyncio.to_thread(self._files.begin, listed))
        try:
            while not (await asyncio.wait({comparing}, timeout=BEAT_S))[0]:
                await self._ask(link, {"kind": messages.WRITE, "changes": []})
        finally:
            await comparing

    async def _ask(self, link: Link, header: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        """Return the collector's answer. Raises LinkError if there is none, or if it refuses."""
        ask = {"host": self._host, "session": self._session, "over": self._over_s is not None, **header}
        if (obeyed := self._obeyed) is not None:
            ask["obeyed"] = obeyed
        question, asked_s = secrets.token_hex(8), time.monotonic()
        raw = await link.request(self._key.seal(ask | {"question": question}, data), ANSWER_S)
        try:
            answer, _ = self._key.open(raw)
        except BadMessage as error:
            raise LinkError(f"the collector's answer is not valid: {error}") from error
        if answer.get("question") != question:
            raise LinkError("the collector answered another question")
        if answer["kind"] == messages.UNKNOWN:
            self._session = ""
            raise LinkError("the collector was started again")
        if answer["kind"] != messages.OK:
            raise LinkError(f"the collector refuses: {messages.shorten(answer.get('why'))}")
        self._sent_s = time.monotonic()
        self._told.clear()
        # The answer to HELLO, which begins a session, and those to earlier sessions take no note of it.
        if self._obeyed is obeyed and header["kind"] not in (messages.HELLO, messages.PING):
            self._obeyed = None
        self._obey(answer.get("stops"))
        if "order" in answer and self._sent_s - asked_s < WAY_S:
            self._obey_order(answer["order"])
        if "detail" in answer:  # also with the list, before anything is sent
            self._is_reduced = answer["detail"] is False
        return answer

    def _obey(self, stops: Any) -> None:
        """Stop the job if that was ordered since we began."""
        if not isinstance(stops, int):
            return
        if self._stops is not None and stops > self._stops:
            try:
                self._job.stop()
            except OSError as error:
                self._tell(f"The job cannot be stopped: {describe_error(error)}")
        self._stops = max(stops, self._stops or 0)

    @property
    def _is_obeying(self) -> bool:
        return self._obeying is not None and not self._obeying.done()

    def _obey_order(self, order: Any) -> None:
        """Begin to carry out an order that was given since we began."""
        number = order.get("number") if isinstance(order, dict) else 0
        if type(number) is not int or self._is_obeying:
            return
        if self._order is not None and number > self._order:
            self._obeyed = {"number": number}
            self._obeying = asyncio.create_task(self._carry_out(number, order))
        self._order = max(number, self._order or 0)

    async def _carry_out(self, number: int, order: dict[str, Any]) -> None:
        try:
            said, done = await asyncio.to_thread(self._job.carry_out, order)
        except Exception as error:
            said, done = [f"{describe_error(error).rstrip('.')}."], False
        self._obeyed = {"number": number, "said": said, "failed": not done}

    def _look_for_end(self) -> None:
        now_s = time.monotonic()
        if self._over_s is None and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            with contextlib.suppress(OSError):
                self._over_s = now_s if self._job.is_over() else None

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)
