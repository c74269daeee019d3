"""Ranks folded by node: a line for each node, the odd ones first, and how the nodes send their parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_recording import BEGIN_NS, S, make_identity, read_recording
from uneven_ranks import ON_A_NODE, write_ranks
from zerotop.analysis.ranks.matrix import RankMetric
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.nodes.clocks import Alignment, write_alignment
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.dialogs.find_rank_dialog import FoundRanks, find_rank
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text
from zerotop.ui.ranks.heatmap import draw_map
from zerotop.ui.ranks.lines import plan_lines
from zerotop.ui.ranks.model import Ranking, RankPicture
from zerotop_probe.recording.events import NodeDetail
from zerotop_probe.recording.identity import Identity
from zerotop_probe.recording.writer import EventWriter

NODES = 9
_OWN = make_identity(-1, host="head-collector")._replace(role="control")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    write_ranks(folder, NODES * ON_A_NODE, 6, late_s={43: 0.2, 9: 0.1}, sampled=False)
    writer = EventWriter(str(folder), _OWN, clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for second, node, is_full in ((1, 0, True), (1, 7, False), (1, 8, False), (4, 8, True)):
        writer.write(second * S, NodeDetail, host=f"node{node:03}", is_full=is_full)
    writer.close()
    for node, error_ns in ((7, 2_300_000), (8, 200_000)):
        own: Identity = _OWN._replace(pid=node)
        write_alignment(str(folder), f"node{node:03}", f"boot{node}", own, Alignment(0, BEGIN_NS, error_ns))
    return folder


def make_picture(folder: Path, *, opened: str = "", rank: int | None = None, by_node: bool | None = None) -> RankPicture:
    source = RecordingSource(read_recording(folder))
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    if rank is not None:
        viewer.set_rank(rank)
    ranking.choose_metric(RankMetric.WAIT)
    ranking.opened, ranking.by_node = opened, by_node
    return ranking.make_picture(viewer.make_frame(), 60)


def read_labels(folder: Path, room: int, opened: str = "", rank: int | None = None) -> list[str]:
    plan = plan_lines(make_picture(folder, opened=opened, rank=rank), room, BLOCKS)
    return [line.mark + line.label + "!" * line.is_chosen for line in plan.lines]


def test_each_node_has_a_line_with_its_ranks_and_their_range(nodes: Path) -> None:
    rows = [row_text(row).rstrip() for row in draw_map(make_picture(nodes), 72, 15, ASCII).rows]
    assert rows[0] == "Ranks: delays others ms  odd nodes first ------------- 0 .:-=+*oO#@ 100+"
    assert rows[3] == " 2 nodes full, 1 reduced; clocks within 2.30 ms"
    assert [(row[:15].rstrip(), row[59:].strip()) for row in rows[4:7]] == [
        (">+node005 40-47", "0-171"),
        (" +node001 8-15", "0-85"),
        (" +node000 0-7", "0"),
    ]


def test_odd_nodes_come_first_and_an_open_node_shows_its_ranks(nodes: Path) -> None:
    others = [f"▸node{node:03} {node * 8}-{node * 8 + 7}" for node in (0, 2, 3, 4, 6, 7, 8)]
    assert read_labels(nodes, 20) == ["▸node005 40-47!", "▸node001 8-15", *others]
    opened = ["8", "9", "10", "11", "12", "13", "14", "15"]
    assert read_labels(nodes, 20, "node001") == ["▸node005 40-47!", "▾node001 8-15", *opened, *others]
    assert read_labels(nodes, 20, "node001", 9)[:4] == ["▸node005 40-47", "▾node001 8-15", "8", "9!"]


def test_of_too_many_lines_those_around_the_chosen_one_are_shown(nodes: Path) -> None:
    assert read_labels(nodes, 3, rank=30) == ["▸node002 16-23", "▸node003 24-31!", "▸node004 32-39"]
    plan = plan_lines(make_picture(nodes, rank=71), 3, BLOCKS)
    assert plan.part == "7-9 of 9"
    assert plan.height == 3


def test_up_and_down_go_by_the_lines_and_a_node_stands_for_its_oddest_rank(nodes: Path) -> None:
    folded = make_picture(nodes)
    assert (folded.chosen_rank, folded.find_node(43), folded.find_node(999)) == (43, "node005", "")
    assert [folded.find_neighbor(number, 43) for number in (-1, 0, 1, 2, 99)] == [43, 43, 9, 0, 64]
    assert [folded.find_neighbor(number, 12) for number in (-1, 0, 1)] == [43, 12, 0]  # another rank of the second node
    opened = make_picture(nodes, opened="node001")
    assert [opened.find_neighbor(number, 9) for number in (-1, 0, 1)] == [8, 9, 10]
    assert (opened.find_neighbor(-1, 8), opened.find_node(9)) == (43, "")
    assert folded.find_first_rank(range(8, 16)) == 9
    alone = make_picture(nodes, by_node=False)
    assert not alone.nodes
    assert alone.find_node(43) == ""


def test_few_ranks_and_one_node_have_lines_of_their_own(tmp_path: Path) -> None:
    write_ranks(tmp_path, 24, 3, sampled=False)
    assert not make_picture(tmp_path).nodes
    assert len(make_picture(tmp_path, by_node=True).nodes) == 3
    one = tmp_path / "one"
    one.mkdir()
    write_ranks(one, 8, 3, sampled=False)
    assert not make_picture(one, by_node=True).nodes


def test_how_much_nodes_send_is_that_of_the_moment(nodes: Path) -> None:
    source = RecordingSource(read_recording(nodes))
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    assert ranking.make_picture(viewer.make_frame(), 60).network.reduced == {"node007"}
    viewer.go_to_ns(BEGIN_NS + 3 * S)
    picture = ranking.make_picture(viewer.make_frame(), 60)
    assert picture.network.reduced == {"node007", "node008"}
    assert picture.network.full == 1  # of those that were told of


def test_a_rank_without_samples_of_its_process_can_be_chosen(tmp_path: Path) -> None:
    """Nodes that send less have spans only."""
    write_ranks(tmp_path, 16, 4)
    for path in tmp_path.glob("processes-*node001*"):
        path.unlink()
    viewer = Viewer(RecordingSource(read_recording(tmp_path)), None, lambda: 0.0)
    for rank, shown in ((12, 12), (3, 3), (99, 0)):
        viewer.set_rank(rank)
        assert viewer.make_frame().rank == shown


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9", FoundRanks((9,), is_node=False)),
        (" Rank 9 ", FoundRanks((9,), is_node=False)),
        ("node1", FoundRanks((8, 9), is_node=True)),
        ("NODE12", FoundRanks((10,), is_node=True)),
        ("2", "There is no rank 2."),
        ("de12", FoundRanks((10,), is_node=True)),
        ("ode", "3 nodes have that in their names: node1, node12, node3"),
        ("other", "No node is called other."),
    ],
)
def test_a_node_or_a_rank_is_found(text: str, found: FoundRanks | str) -> None:
    assert find_rank(text, {8: "node1", 9: "node1", 10: "node12", 11: "node3"}) == found
