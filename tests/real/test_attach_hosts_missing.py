"""Nodes that take no part in what ``zerotop attach --hosts`` records: each is named, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nodes
import zerotop_probe
from agents import wait_for
from node_jobs import (
    Zerotop,
    attach_zerotop,
    bind_file,
    count_samples,
    find_first_pid,
    hide_folder,
    list_samplers,
    start_rank_on,
    wait_for_both,
)
from nodes import Cluster
from programs import ZEROTOP, make_environment
from real_jobs import TIMEOUT_S
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import SESSION_FILE

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(bool(nodes.explain_missing_nodes()), reason=nodes.explain_missing_nodes() or "-"),
]


@pytest.mark.usefixtures("cluster_job")
def test_nodes_that_cannot_take_part_get_a_sentence_and_the_others_go_on(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    two = cluster.nodes[1]
    settings = Path(cluster.folder / "ssh_config")
    lost = "Host silent\n  HostName 10.231.77.99\n  ConnectTimeout 1\n"
    refused = f"Host refused\n  HostName {two.address}\n  Port 23\n"
    stranger = f"Host stranger\n  HostName {two.address}\n  UserKnownHostsFile none\n"
    locked = f"Host locked\n  HostName {two.address}\n  User root\n  UserKnownHostsFile {cluster.folder}/known\n"
    odd = tmp_path / "ssh_config"
    odd.write_text(lost + refused + stranger + locked + settings.read_text())
    ssh = ("--ssh", f"ssh -F {odd}")
    names = "refused,stranger,locked,zt-node-2,silent"
    with attach_zerotop(call_zerotop, cluster, tmp_path, *ssh, "--hosts", names) as messages:
        (recording,) = (tmp_path / "zerotop" / "sessions").iterdir()
        assert messages[0].startswith("refused takes no part: ssh cannot connect (connect to host 10.231.77.2 port 23: ")
        assert messages[1] == "stranger takes no part: ssh does not know its host key. Connect once by hand and accept it."
        assert messages[2].startswith("locked takes no part: ssh cannot log in without a password (")
        assert messages[3].startswith("silent takes no part: ssh cannot connect (connect to host 10.231.77.99 port 22: ")
        assert len(messages) == 5
        wait_for_both(recording)
        notices = RecordingSource(Recording.open(recording)).view_at(None).job.notices
        assert [line in notices for line in messages[:4]] == [True] * 4


@pytest.mark.usefixtures("cluster_job")
def test_a_node_that_does_not_see_the_folder_sends_its_part_by_ssh(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    """Also after the network was gone, and once more after it was detached from."""
    two, state = cluster.nodes[1], tmp_path / "zerotop"
    (state / "sessions").mkdir(parents=True)
    recording = state / "sessions" / "brisk-otter"
    with hide_folder(two, state):
        for options in (["--recording", str(recording)], []):
            known, sampled = None if options else recording, count_samples(recording)
            with attach_zerotop(
                call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2", *options, recording=known
            ) as messages:
                assert messages == [f"recording in {recording}"]
                wait_for_both(recording, sampled)
                assert call_zerotop("attach", recording.name, "--hosts", "zt-node-2").stderr.count("\n") == 1
                if options:
                    cluster.cut_off(two)
                    wait_for(lambda: Recording.open(recording).events_of(events.NodeLost), 30)
                    cluster.connect(two)
                    wait_for(lambda: Recording.open(recording).events_of(events.NodeReturned), 60)
                done = call_zerotop("detach", recording.name)
                assert (done.returncode, done.stdout) == (0, f"Recorded in {recording}\n")
                wait_for(lambda: "--parts" not in cluster.nodes[0].run_command("ps", "-eo", "args").stdout)
                assert "--by-pipe" not in two.run_command("ps", "-eo", "args").stdout
                wait_for(lambda: list_samplers(two) == "")
    recorded = Recording.open(recording)
    assert recorded.is_over
    names = [event.event_name for event in recorded.events if event.writer.host == "zt_node_2"]
    assert [name for name in names if name in ("joined", "parted")] == ["joined", "parted"] * 2
    (aligned,) = recording.glob("events-control-zt_node_2-zt_node_1-collector-*.jsonl")
    assert 0 < json.loads(aligned.read_text())["error_ns"] < 10**6


@pytest.mark.usefixtures("cluster_job")
def test_a_pod_is_reached_by_kubectl_exec(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    """There is no cluster here: a program that takes the arguments of kubectl for one pod and runs them there by ssh."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\n[ "$*" = "exec -i zt-node-2 -c trainer -- sh" ] && exec {cluster.ssh} zt-node-2 sh\n')
    kubectl.chmod(0o755)
    (tmp_path / "zerotop").mkdir()
    template = f"{kubectl} exec -i {{}} -c trainer --"
    with (
        hide_folder(cluster.nodes[1], tmp_path / "zerotop"),
        attach_zerotop(call_zerotop, cluster, tmp_path, "--ssh", template, "--hosts", "zt-node-2") as messages,
    ):
        recording = Path(messages[-1].partition("recording in ")[2])
        wait_for_both(recording)
        done = call_zerotop("detach", "--ssh", template, str(recording))
        assert (done.returncode, done.stdout) == (0, f"Recorded in {recording}\n")
        wait_for(lambda: list_samplers(cluster.nodes[1]) == "")


@pytest.mark.usefixtures("cluster_job")
def test_a_node_without_zerotop(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    package = Path(zerotop_probe.__file__).parent / "outside" / "attaching"
    with (
        hide_folder(cluster.nodes[1], package),
        attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as messages,
    ):
        assert messages[0] == (
            f"zt-node-2 takes no part: zerotop is installed neither for {sys.executable} nor on the PATH there. "
            "Install it on that node."
        )


@pytest.mark.usefixtures("cluster_job")
def test_zerotop_at_another_place_is_found_by_the_path(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    one, two = cluster.nodes
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "bin").mkdir(parents=True)
    with hide_folder(one, elsewhere):
        prefix = Path(sys.executable).parent.parent
        for name in ("lib", "pyvenv.cfg"):
            if (prefix / name).exists():
                one.run_command("ln", "-s", str(prefix / name), str(elsewhere / name), check=True)
        one.run_command("mkdir", str(elsewhere / "bin"), check=True)
        python = elsewhere / "bin" / "python"
        one.run_command("ln", "-s", os.path.realpath(sys.executable), str(python), check=True)
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\ntouch {tmp_path}/asked\nexec {sys.executable} -m zerotop "$@"\n')
        program.chmod(0o755)
        with bind_file(two, program, Path("/usr/bin/zerotop")):
            options = ("--hosts", "zt-node-2", "--recording", f"{tmp_path}/recording")
            with attach_zerotop(
                call_zerotop, cluster, tmp_path, *options, program=[str(python), "-m", "zerotop"]
            ) as messages:
                assert messages == [f"recording in {tmp_path}/recording"]
                assert (tmp_path / "asked").exists()
                wait_for_both(tmp_path / "recording")
    wait_for(lambda: list_samplers(two) == "")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.231.77.1"])
def test_another_job_that_meets_at_the_same_port_is_not_taken_for_this_one(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path, address: str
) -> None:
    one, two = cluster.nodes
    with start_rank_on(one, 0, tmp_path, MASTER_ADDR=address), start_rank_on(two, 0, tmp_path, MASTER_ADDR=address):  # noqa: SIM117
        with attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as messages:
            assert messages[0] == "zt-node-2 takes no part: no rank of this job runs there."
    wait_for(lambda: list_samplers(two) == "")


@pytest.mark.usefixtures("cluster_job")
def test_another_format_of_recordings_is_reported(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    two = cluster.nodes[1]
    with attach_zerotop(call_zerotop, cluster, tmp_path) as messages:
        recording = messages[-1].partition("recording in ")[2]
        assert (Path(recording) / SESSION_FILE).exists()
        request = {"from": ["elsewhere", ""], "format": [99, 0], "recording": recording, "action": "join"}
        done = two.run_command(*ZEROTOP, "attach", "--there", json.dumps(request), env=make_environment(tmp_path))
    answer = json.loads(done.stdout)["zerotop_there"]
    assert "zerotop there records in format 1." in answer["why_not"]
    assert "this recording has format 99.0. Install the same version on both nodes" in answer["why_not"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("-oProxyCommand=touch bad", "'-oProxyCommand=touch bad' is not a valid node name"),
        ("zt-node-2;touch bad", "'zt-node-2;touch bad' is not a valid node name"),
        (",", "There are no node names"),
        ("@nowhere", "No such file or directory: nowhere"),
    ],
)
@pytest.mark.usefixtures("cluster_job")
def test_a_host_list_that_names_no_nodes_is_refused(call_zerotop: Zerotop, tmp_path: Path, names: str, said: str) -> None:
    done = call_zerotop("attach", find_first_pid(call_zerotop), f"--hosts={names}", "--headless")
    assert done.returncode in (1, 2)
    assert done.stderr == f"zerotop: {said}\n"
    assert not (tmp_path / "zerotop").exists()


@pytest.mark.usefixtures("cluster_job")
def test_a_launcher_that_names_no_nodes_and_an_ssh_that_does_not_exist(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    with attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "job") as messages:
        assert messages[0] == "The job's launcher does not say which nodes it uses. Name them, or give a hostfile as @FILE."
        (recording,) = (tmp_path / "zerotop" / "sessions").iterdir()
        said = call_zerotop("attach", recording.name, "--hosts", "zt-node-2", "--ssh", "no-such-ssh").stderr.splitlines()
        assert said[0] == (
            "zerotop: no-such-ssh cannot be executed (No such file or directory). "
            "Choose another command with --ssh or ZEROTOP_SSH."
        )


def test_a_job_of_one_node_asks_no_other(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    with (
        start_rank_on(cluster.nodes[0], 0, tmp_path, WORLD_SIZE="1"),
        attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as messages,
    ):
        assert messages[0] == "All ranks of the job run on this node: no other node was asked."


@pytest.mark.usefixtures("cluster_job")
def test_a_connection_that_breaks_leaves_nothing_that_detach_does_not_end(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    two, breaking = cluster.nodes[1], tmp_path / "ssh"
    breaking.write_text(f'#!/bin/sh\n{cluster.ssh} "$@" | head -2\nexit 255\n')  # it has begun there, and no more is heard
    breaking.chmod(0o755)
    with attach_zerotop(call_zerotop, cluster, tmp_path, "--ssh", str(breaking), "--hosts", "zt-node-2") as messages:
        assert messages[0] == (
            "zt-node-2 may or may not take part: the connection broke before it answered. Attach again with --hosts to ask"
            " it again; detach ends its part too."
        )
        wait_for(lambda: list_samplers(two))
        recording = messages[-1].partition("recording in ")[2]
        notices = RecordingSource(Recording.open(Path(recording))).view_at(None).job.notices
        assert "zt-node-2 takes no part: the connection broke before it answered." in notices
        assert call_zerotop("detach", recording).returncode == 0
        wait_for(lambda: not list_samplers(two))


FIVE_MINUTES_AHEAD = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *time) {
  int failed = syscall(SYS_clock_gettime, clock, time);
  if (!failed && clock == CLOCK_REALTIME) time->tv_sec += 300;
  return failed;
}
"""


def read_alive(recording: Path) -> list[bool]:
    return [rank.alive for rank in RecordingSource(Recording.open(recording)).view_at(None).ranks]


@pytest.mark.usefixtures("cluster_job")
def test_a_clock_that_is_minutes_off_is_reported_and_put_right(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    two, shift = cluster.nodes[1], tmp_path / "shift"
    shift.mkdir()
    library = shift / "shift.so"  # zerotop's Python is isolated from what PYTHONPATH has
    compiling = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiling, input=FIVE_MINUTES_AHEAD, text=True, check=True)
    (shift / "boot_id").write_text("another-boot\n")
    two.run_command("mount", "--bind", str(shift / "boot_id"), "/proc/sys/kernel/random/boot_id", check=True)
    wrong = tmp_path / "ssh"
    wrong.write_text(f'#!/bin/sh\nexec {cluster.ssh} "$@" -c "\'LD_PRELOAD={library} exec sh\'"\n')
    wrong.chmod(0o755)
    try:
        with attach_zerotop(call_zerotop, cluster, tmp_path, "--ssh", str(wrong), "--hosts", "zt-node-2") as messages:
            recording = Path(messages[-1].partition("recording in ")[2])
            assert messages[0] == (
                "The clock of zt-node-2 is 5 min ahead of this one: its times are corrected to about a second."
                " Set both by NTP."
            )
            wait_for_both(recording)
            recorded = Recording.open(recording)
            one, other = sorted(recorded.sources["processes"], key=lambda source: source.host)
            newest = [source.array["time_ns"][-1] + source.offset_ns for source in (one, other)]
            assert abs(newest[0] - newest[1]) < 15 * 10**9
            pair = other.header["clock"]
            assert pair["unix_ns"] - pair["monotonic_ns"] - other.offset_ns > 280 * 10**9
            wait_for(lambda: read_alive(recording) == [True, True], 60)
    finally:
        two.run_command("umount", "/proc/sys/kernel/random/boot_id", check=True)
    wait_for(lambda: list_samplers(two) == "")
