"""The commands about a job that runs: ``demo``, ``run``, ``attach``, ``detach`` and ``microscope``."""

from __future__ import annotations

import argparse
import os

from zerotop.commands.options.common_options import JSON_HELP, RECORDING_HELP, AddCommand, add_price, name_recordings_folder
from zerotop.commands.options.option_types import parse_address, parse_count, parse_max_size, parse_percent

_RECORDING_DIR_HELP = f"record in this folder [a new one in {name_recordings_folder()}]".replace("%", "%%")

# The names are declared in commands.nodes, which is imported only where it is needed.
_COLLECTOR, _JOB = os.environ.get("ZEROTOP_COLLECTOR"), os.environ.get("ZEROTOP_JOB")


def add_job_commands(add_command: AddCommand) -> None:
    """Add the commands with their options."""
    _add_start(add_command)
    _add_attach(add_command)
    _add_collect(add_command)
    _add_microscope(add_command)


def _add_start(add_command: AddCommand) -> None:
    demo = add_command(
        "demo", "train a small model with a planted fault, and watch it", "zerotop demo --recorded", "zerotop demo"
    )
    demo.add_argument("--recorded", action="store_true", help="replay a recording of an 8 B model on 4 GPUs instead")
    demo.add_argument("--steps", type=parse_count, help="optimizer steps to train [200; 600 on GPUs]")
    demo.add_argument("--fixed", action="store_true", help="without the fault")
    demo.add_argument("--offload", action="store_true", help="with DeepSpeed's CPU optimizer: compiled on the first run")
    run = add_command(
        "run",
        "start a job and watch it",
        "zerotop run deepspeed --num_gpus 8 train.py --deepspeed_config ds.json",
        "zerotop run --headless -- torchrun --nproc-per-node 8 train.py",
        usage="%(prog)s [-h] [--recording DIR] [--require-recording] [--max-size SIZE] [--headless] [--redact-output]"
        " [--no-record-output] [--no-phase-peaks] [--no-stacks] [--budget PERCENT] [--nccl-inspector PLUGIN]"
        " [--report FILE] [--expect QUESTION] [--notify COMMAND|URL] [--prometheus-textfile DIR]"
        " [--prometheus-port [HOST:]PORT] [--otlp] [--price-per-hour PRICE] [--collector ADDRESS --job NAME]"
        " [--] COMMAND ...",
    )
    run.add_argument("--recording", metavar="DIR", help=_RECORDING_DIR_HELP)
    _add_max_size(run)
    run.add_argument("--headless", action="store_true", help="without the screen; pass output and signals through")
    run.add_argument(
        "--require-recording", action="store_true", help="do not start the job if nothing can be recorded in the folder"
    )
    run.add_argument("--redact-output", action="store_true", help="replace secrets in the recorded output, too")
    run.add_argument(
        "--no-record-output",
        action="store_true",
        help="without the screen; leave the output and the terminal to the job, as a pager or debugger needs it",
    )
    run.add_argument("--no-phase-peaks", action="store_true", help="do not reset the peak counters of PyTorch's allocator")
    _add_no_stacks(run)
    run.add_argument(
        "--budget",
        type=parse_percent,
        metavar="PERCENT",
        help="largest share of the training time that watching may take; short steps get less detail for it [0.3]",
    )
    run.add_argument(
        "--nccl-inspector",
        metavar="PLUGIN",
        help="let NCCL measure its collectives with its Inspector, libnccl-profiler-inspector.so; see docs/hardware.md",
    )
    run.add_argument("--report", metavar="FILE", help="write an HTML report when the job has ended")
    run.add_argument(
        "--expect",
        metavar="QUESTION",
        help='predict, and keep the answer beside what is measured: "what-if brisk-otter --stage 3"; see estimate --grade',
    )
    run.add_argument(
        "--notify",
        metavar="COMMAND|URL",
        help="report warnings, hangs and the end: JSON on the command's standard input, or posted to http(s)://",
    )
    run.add_argument(
        "--prometheus-textfile", metavar="DIR", help="write metrics to this folder of node_exporter's textfile collector"
    )
    run.add_argument(
        "--prometheus-port",
        type=parse_address,
        metavar="[HOST:]PORT",
        help="serve metrics to Prometheus on this port [of 127.0.0.1]; 0.0.0.0:PORT for other machines",
    )
    run.add_argument(
        "--otlp", action="store_true", help="send metrics and findings to an OpenTelemetry collector [localhost:4318]"
    )
    add_price(run)
    _add_collector(run)
    run.add_argument("first_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the command, where no -- precedes it


def _add_attach(add_command: AddCommand) -> None:
    attach = add_command(
        "attach",
        "list running jobs, or watch one, even if not started by zerotop",
        "zerotop attach",
        "zerotop attach 4711 --enter",
        "zerotop attach 4711 --hosts worker-2,worker-3",
    )
    attach.add_argument(
        "recording", nargs="?", metavar="PID|RECORDING", help="a process of the job, or a recording [list the jobs]"
    )
    attach.add_argument("--enter", action="store_true", help="inject the probe into its ranks, for phases and memory")
    attach.add_argument("--headless", action="store_true", help="without the screen; record until the job ends")
    attach.add_argument("--json", action="store_true", help="print the list of jobs as JSON for programs")
    attach.add_argument("--recording", dest="folder", metavar="DIR", help=_RECORDING_DIR_HELP)
    _add_max_size(attach)
    _add_no_stacks(attach)
    _add_host_options(attach, "other nodes too: HOST,HOST or @HOSTFILE, or the word job for the nodes of its launcher")
    attach.add_argument("--there", metavar="REQUEST", help=argparse.SUPPRESS)
    detach = add_command("detach", "remove the probe, stop recording", "zerotop detach 4711")
    detach.add_argument("recording", metavar="PID|RECORDING", help="a process of the job, or a recording")
    _add_host_options(detach, "on these nodes [all that attach reached from here]")


def _add_collect(add_command: AddCommand) -> None:
    collect = add_command(
        "collect",
        "watch a job on many nodes, each started by run --collector",
        "zerotop collect nats://head:4222 --job llama",
        "zerotop collect nats://head:4222 --job llama --headless",
    )
    collect.add_argument(
        "collector", metavar="ADDRESS", nargs="?", default=_COLLECTOR, help="address of a NATS server [$ZEROTOP_COLLECTOR]"
    )
    _add_job(collect)
    collect.add_argument(
        "--recording",
        dest="folder",
        metavar="DIR",
        help="record in this folder [one named as the job in the state directory]",
    )
    collect.add_argument("--max-size", type=parse_max_size, metavar="SIZE", help="largest size of each node's part [2.5GB]")
    collect.add_argument(
        "--full-nodes",
        type=parse_count,
        metavar="N",
        help="number of nodes that always send full detail [64]",
    )
    collect.add_argument("--headless", action="store_true", help="without the screen; until all nodes have ended")
    collect.add_argument("--until-closed", action="store_true", help=argparse.SUPPRESS)
    collect.add_argument("--beside", metavar="RECORDING", help=argparse.SUPPRESS)
    collect.add_argument("--parts", metavar="JSON", help=argparse.SUPPRESS)
    collect.add_argument("--expects", type=int, default=0, help=argparse.SUPPRESS)
    forward = add_command(
        "forward",
        "send a node's recording to zerotop collect",
        "zerotop forward brisk-otter --collector nats://head:4222 --job llama",
    )
    forward.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    forward.add_argument("--remove-sent", action="store_true", help=argparse.SUPPRESS)
    forward.add_argument("--by-pipe", action="store_true", help=argparse.SUPPRESS)
    forward.add_argument("--for-rank", type=int, metavar="PID", help=argparse.SUPPRESS)
    forward.add_argument("--lock", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    _add_collector(forward)


def _add_collector(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--collector",
        metavar="ADDRESS",
        default=_COLLECTOR,
        help="send the recording through this NATS server to zerotop collect [$ZEROTOP_COLLECTOR]",
    )
    _add_job(command)


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("--job", metavar="NAME", default=_JOB, help="name of the job, the same on all nodes [$ZEROTOP_JOB]")


def _add_microscope(add_command: AddCommand) -> None:
    microscope = add_command(
        "microscope",
        "trace every allocation in a running job's next steps",
        "zerotop microscope brisk-otter --steps 2",
    )
    microscope.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    microscope.add_argument("--steps", type=parse_count, default=1, help="optimizer steps to trace [1]")
    microscope.add_argument("--stacks", action="store_true", help="record Python stacks for memory_viz, which is slow")
    microscope.add_argument(
        "--wait", type=parse_count, default=120, metavar="SECONDS", help="longest wait for the steps [120]"
    )
    microscope.add_argument("--json", action="store_true", help=JSON_HELP)


def _add_max_size(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-size", type=parse_max_size, metavar="SIZE", help="largest size of the recording, such as 500MB or 10GB [2GB]"
    )


def _add_no_stacks(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-stacks", action="store_true", help="do not record Python stacks of slow or silent ranks and of allocations"
    )


def _add_host_options(command: argparse.ArgumentParser, hosts_help: str) -> None:
    command.add_argument("--hosts", metavar="HOSTS", help=hosts_help)
    command.add_argument("--ssh", metavar="COMMAND", help="ssh, or 'kubectl exec -i {} --' [$ZEROTOP_SSH]")
