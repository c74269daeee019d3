"""What NCCL says about the operations that ranks have launched."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from zerotop.analysis.hangs.sentences import describe_collectives
from zerotop.analysis.hangs.stacks import Launched, StackFrame, StackReport, ThreadStack
from zerotop.analysis.hangs.standstill import group_ranks
from zerotop.recording.keys import RankProcess
from zerotop_probe.outside.sampling.stuck.nccl_ras import parse_status, read_launched

STATUS = """NCCL version 2.28.3 compiled with CUDA 13.0

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 60
  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.1
  Rank 3 -- GPU 3 managed by process 103 on node 10.0.0.1
  Rank 1 has launched up to operation 59 -- GPU 1 managed by process 101 on node 10.0.0.1

#1-0 (99a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  Rank 0 has launched up to operation 7 -- GPU 4 managed by process 900 on node 10.0.0.1
  Rank 1 has not launched any operations -- GPU 5 managed by process 901 on node 10.0.0.1
"""


@contextmanager
def answer_with(text: str, asked: list[bytes]) -> Iterator[str]:
    """Listen as NCCL does; gives the address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline())
            self.wfile.write(text.encode())

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        thread.join()


def test_the_operations_of_each_rank_are_read() -> None:
    asked: list[bytes] = []
    with answer_with(STATUS, asked) as address:
        launched = read_launched([101], {"NCCL_RAS_ADDR": address})
    assert asked == [b"verbose status\n"]
    assert [(one["operation"], one["rank"], one["pid"], one["launched"]) for one in launched] == [
        ("AllReduce", 0, 100, 60),
        ("AllReduce", 2, 102, 60),
        ("AllReduce", 3, 103, 60),
        ("AllReduce", 1, 101, 59),
    ]


def test_other_jobs_are_left_out() -> None:
    assert [one["launched"] for one in parse_status(STATUS, [901])] == [7, 0]
    assert parse_status(STATUS, [5]) == parse_status("", [101]) == parse_status("garbage #0-0 (12)", [101]) == []


def test_nothing_answers() -> None:
    for address in ("127.0.0.1:1", "nowhere", "127.0.0.1:port"):
        assert read_launched([101], {"NCCL_RAS_ADDR": address}) == []


def test_the_sentence_says_how_many_operations_were_launched() -> None:
    """Of rank 1 py-spy has read the stacks: its Python does not run."""
    ranks = [RankProcess("node1", 100 + rank, rank) for rank in range(3)]
    thread = ThreadStack("", "sleep", (StackFrame("train.py", 40, "build", True),))
    counts = tuple(Launched("AllReduce", process.pid, 59 if process.rank == 1 else 60) for process in ranks)
    stacks = {process: StackReport(process, 1, 60, "between phases", (thread,)) for process in ranks}
    stacks[ranks[1]] = replace(stacks[ranks[1]], is_running=False, launched=counts)
    said = describe_collectives(group_ranks(ranks, stacks, {}))
    assert said == "NCCL has launched 60 AllReduce operations on ranks 0 and 2, 59 AllReduce operations on rank 1."
