"""When a rank's process was over: from its own word, its sampler's, and the end of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.process_exits import ProcessExits, find_alive_processes, read_exits
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory
from zerotop_probe.recording.events import Goodbye, JobEnded, JobStarted, RankGone
from zerotop_probe.recording.tables import BEGINS
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

S = 10**9


class Nodes:
    """A recording by two nodes, a rank on each: pids 10 and 11."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(directory.create_recording(["train.py"], path=str(folder / "recording")))
        self.recording = Recording.open(self.path)
        first = self.recording.info["clock"]["monotonic_ns"]
        self._zero_ns = first + 60 * S
        self.ranks = [Identity("rank", number, f"n{number}", 10 + number, 1, "boot") for number in (0, 1)]
        self.nodes = [EventWriter(str(self.path), Identity("node", -1, host, 9, 1, "boot")) for host in ("n0", "n1")]
        self.own = [EventWriter(str(self.path), identity) for identity in self.ranks]
        for identity in self.ranks:
            RecordWriter(str(self.path), BEGINS, identity).close()

    def unix_ns_at(self, second: int) -> int:
        return int(self._zero_ns + second * S)

    def find_exits(self) -> list[int | None]:
        """In seconds, by rank."""
        self.recording.refresh()
        zero = self.recording.begin_ns + 60 * S
        ends = [ProcessExits(self.recording.events).find_exit(source) for source in self.recording.sources["begins"]]
        return [None if end is None else round((end - zero) / S) for end in ends]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_the_first_word_of_an_end_counts(two_nodes: Nodes) -> None:
    assert two_nodes.find_exits() == [None, None]
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(4), RankGone, rank=0, pid=10)
    two_nodes.own[0].write(two_nodes.unix_ns_at(3), Goodbye)
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(5), RankGone, rank=1, pid=11)  # another node's number
    assert two_nodes.find_exits() == [3, None]


def test_a_command_takes_its_own_node_with_it(two_nodes: Nodes) -> None:
    for node in two_nodes.nodes:
        node.write(two_nodes.unix_ns_at(0), JobStarted, pid=8, start=1)
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(4), JobEnded, exit_code=0)
    assert two_nodes.find_exits() == [4, None]


def test_a_launcher_takes_all_nodes_with_it(two_nodes: Nodes) -> None:
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(0), JobStarted, pid=8, start=1)
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(4), JobEnded, exit_code=0)
    assert two_nodes.find_exits() == [4, 4]
    assert find_alive_processes(two_nodes.recording.at(two_nodes.recording.begin_ns + 63 * S)) == (
        RankProcess("n0", 10, 0),
        RankProcess("n1", 11, 1),
    )
    assert find_alive_processes(two_nodes.recording.at(two_nodes.recording.begin_ns + 65 * S)) == ()


def test_later_exits_and_commands_are_not_known_yet(two_nodes: Nodes) -> None:
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(2), JobEnded, exit_code=0)
    two_nodes.nodes[1].write(two_nodes.unix_ns_at(6), JobStarted, pid=8, start=1)
    two_nodes.own[1].write(two_nodes.unix_ns_at(9), Goodbye)
    two_nodes.recording.refresh()
    recording, (_, other) = two_nodes.recording, two_nodes.recording.sources["begins"]
    zero = recording.begin_ns + 60 * S
    ends = [read_exits(recording.at(zero + second * S)).find_exit(other) for second in (1, 3, 7, 10)]
    assert [end and round((end - zero) / S) for end in ends] == [None, 2, None, 9]


def test_an_end_before_its_beginning_was_another_process_s(two_nodes: Nodes) -> None:
    two_nodes.nodes[0].write(two_nodes.unix_ns_at(-120), RankGone, rank=0, pid=10)
    assert two_nodes.find_exits() == [None, None]
