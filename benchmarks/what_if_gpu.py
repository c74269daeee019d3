"""Record the trainings by which ``zerotop what-if`` is graded: one model at many settings, on up to four GPUs.

    python benchmarks/what_if_gpu.py FOLDER [--until 430]     # all settings, 15 steps each
    python benchmarks/what_if_gpu.py FOLDER --story           # the 8 B model: offload, without it, stage 3
    python benchmarks/what_if_gpu.py FOLDER --list            # the settings, and which are held out

FOLDER gets a packed recording and a log of each training, and all of them as ``what_if-N.tar`` of at most 15 MiB. The
first thing that runs is ``doctor --measure``, whose output and file are kept there, too. Trainings on one GPU run side by
side, but only one with offload at a time, as they share the host's memory; each rank has a quarter of the cores. A third of
the settings, by a hash of their names, is held out: no constant may be chosen by their errors. Then:

    python benchmarks/what_if.py --write FOLDER
    python benchmarks/what_if.py --kind tuned          # and --kind held-out at the end, once
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CORES = max(1, (os.cpu_count() or 1) // 4)  # of a rank
_TAR_BYTES = 15 << 20
_LIMIT_S = 75.0  # of one training
_STORY_LIMIT_S = 130.0
_DEVICES: dict[str, dict[str, str]] = {
    "none": {},
    "cpu": {"offload_optimizer": "cpu"},
    "all": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}
# Width, layers, heads, heads of keys and values, width of the MLP, vocabulary.
_SIZES = {
    "llama-300m": (1024, 16, 16, 16, 2816, 32000),
    "llama-1b": (2048, 22, 32, 4, 5632, 32000),
    "gpt2-350m": (1024, 24, 16, 16, 4096, 50257),
    "llama-8b": (4096, 32, 32, 8, 14336, 128256),
}


@dataclass(frozen=True)
class Setting:
    """One training."""

    model: str
    stage: int
    offload: str = "none"
    gpus: int = 1
    rows: int = 2
    length: int = 1024
    accumulation: int = 1
    checkpointing: int = 0
    steps: int = 15

    @property
    def name(self) -> str:
        """The name of its recording."""
        zero = f"{self.model}-g{self.gpus}-z{self.stage}-{self.offload}"
        return f"{zero}-b{self.rows}-s{self.length}-a{self.accumulation}-c{self.checkpointing}"


_BIG, _SMALL, _GPT2 = "llama-1b", "llama-300m", "gpt2-350m"
SETTINGS = (
    Setting(_BIG, 2),
    Setting(_BIG, 2, rows=8),
    Setting(_BIG, 2, length=2048),
    Setting(_BIG, 2, accumulation=4),
    Setting(_BIG, 2, rows=8, checkpointing=1),
    Setting(_BIG, 3),
    Setting(_BIG, 0),
    Setting(_BIG, 2, "cpu"),
    Setting(_BIG, 2, "cpu", rows=8),
    Setting(_BIG, 2, "cpu", accumulation=4),
    Setting(_BIG, 3, "cpu"),
    Setting(_BIG, 3, "all"),
    Setting(_GPT2, 2, rows=4, length=512),
    Setting(_GPT2, 2, rows=16, length=512),
    Setting(_GPT2, 1, rows=4),
    Setting(_GPT2, 2, "cpu", rows=4, length=512),
    Setting(_SMALL, 2, rows=4, length=512),
    Setting(_SMALL, 2, rows=32, length=512),
    Setting(_SMALL, 2, "cpu", rows=4, length=512),
    Setting(_BIG, 2, gpus=4),
    Setting(_BIG, 3, gpus=4),
    Setting(_BIG, 2, "cpu", gpus=4),
    Setting(_BIG, 3, "cpu", gpus=4),
    Setting(_BIG, 0, gpus=4),
    Setting(_BIG, 3, gpus=4, rows=8),
    Setting(_GPT2, 3, gpus=4, rows=4, length=512),
    Setting(_BIG, 2, gpus=2),
    Setting(_BIG, 3, gpus=2),
    Setting(_BIG, 1, gpus=2),
    Setting(_BIG, 2, "cpu", gpus=2),
    Setting(_GPT2, 2, gpus=2, rows=4, length=512),
    Setting(_SMALL, 0, gpus=2, rows=4, length=512),
    Setting(_GPT2, 2, "cpu", gpus=4, rows=4, length=512),
    Setting(_BIG, 3, gpus=4, rows=4, length=2048, checkpointing=1),
)
STORY = tuple(
    Setting("llama-8b", stage, offload, gpus=4, rows=1, length=2048, checkpointing=1, steps=steps)
    for stage, offload, steps in ((2, "cpu", 8), (2, "none", 12), (3, "none", 12))
)


HELD_OUT = frozenset(one.name for one in SETTINGS if int(hashlib.sha256(one.name.encode()).hexdigest(), 16) % 3 == 0)
"""No constant may be chosen by recordings of these names."""


# --- the training, in each rank --------------------------------------------------------------------------------------------


def train(setting: Setting) -> None:
    """Train on random tokens."""
    import deepspeed
    import torch
    import torch._dynamo  # what replaces torch.Tensor.new_tensor below must not be there when it is loaded

    on_gpu = torch.cuda.is_available()
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    devices = {key: {"device": value, "pin_memory": on_gpu} for key, value in _DEVICES[setting.offload].items()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": setting.stage, "overlap_comm": True, **devices},
        "steps_per_print": 10**9,
    }
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with ExitStack() as building:
        building.enter_context(device)
        if setting.model == "llama-8b" and setting.stage == 3:
            building.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        model = build_model(setting)
    torch.set_default_dtype(torch.float32)
    vocabulary = model.config.vocab_size
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = None
    if setting.offload == "none":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    parameters = None if optimizer else model.parameters()
    engine = deepspeed.initialize(model=model, model_parameters=parameters, optimizer=optimizer, config=config)[0]
    ends = []
    for _ in range(setting.steps):
        for _ in range(setting.accumulation):
            tokens = torch.randint(vocabulary, (setting.rows, setting.length)).to(device)
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            engine.step()
        ends.append(time.perf_counter())
    if torch.distributed.get_rank() == 0:
        print("SECONDS", [round(later - earlier, 4) for earlier, later in itertools.pairwise(ends)], flush=True)
    torch.distributed.destroy_process_group()


def build_model(setting: Setting) -> Any:
    """Return a model of random weights, on a CPU a tiny one."""
    import torch
    import transformers

    width, layers, heads, groups, inner, vocabulary = _SIZES[setting.model]
    if not torch.cuda.is_available():
        width, layers, heads, groups, inner, vocabulary = 64, 2, 4, 2, 128, 256
    if setting.model.startswith("gpt2"):
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": setting.length}
        config = transformers.GPT2Config(vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=setting.length,
    )
    return transformers.LlamaForCausalLM(config)


# --- the trainings, side by side -------------------------------------------------------------------------------------------


class Machine:
    """The GPUs that are free, and whether a training with offload runs."""

    def __init__(self, gpus: int, until_s: float) -> None:
        self.free, self.until_s = set(range(gpus)), until_s
        self.changed, self.is_offloading = threading.Condition(), False

    def take(self, waiting: list[Setting]) -> tuple[Setting, list[int]] | None:
        """Wait for a setting that can start, and its GPUs; None when all have started, or the time is over."""
        with self.changed:
            while waiting and time.monotonic() < self.until_s:
                for setting in waiting:
                    if setting.gpus <= len(self.free) and not (self.is_offloading and setting.offload != "none"):
                        waiting.remove(setting)
                        own = sorted(self.free)[: setting.gpus]
                        self.free -= set(own)
                        self.is_offloading |= setting.offload != "none"
                        return setting, own
                    if setting.gpus > len(self.free):
                        break  # those behind it must not take its GPUs
                self.changed.wait(1.0)
            return None

    def give_back(self, setting: Setting, own: Sequence[int]) -> None:
        """Free the GPUs of a training that has ended."""
        with self.changed:
            self.free |= set(own)
            if setting.offload != "none":
                self.is_offloading = False
            self.changed.notify_all()


def record(setting: Setting, gpus: Sequence[int], folder: Path, limit_s: float) -> None:
    """Record one training, and pack the recording."""
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, gpus)), OMP_NUM_THREADS=str(_CORES))
    launch = ["-m", "torch.distributed.run", "--master-port", str(29500 + gpus[0]), "--nproc-per-node", str(setting.gpus)]
    zerotop, begin = [sys.executable, "-m", "zerotop"], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, open(folder / f"{setting.name}.log", "w") as log:
        command = [*zerotop, "run", "--headless", "--budget", "100", "--recording", f"{temporary}/{setting.name}", "--"]
        command += [sys.executable, *launch, __file__, "--train", json.dumps(asdict(setting))]
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            job.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        packed = folder / f"{setting.name}.zerotop"
        packing = [*zerotop, "pack", f"{temporary}/{setting.name}", "-o", str(packed), "--force"]
        subprocess.run(packing, stdout=log, stderr=subprocess.STDOUT, timeout=60, check=False)
        if not packed.exists():  # as without polars: it can be packed elsewhere
            with tarfile.open(folder / f"{setting.name}.tar.gz", "w:gz") as archive:
                archive.add(f"{temporary}/{setting.name}", setting.name)
    seconds = [
        line for line in (folder / f"{setting.name}.log").read_text(errors="replace").splitlines() if "SECONDS" in line
    ]
    print(f"{time.monotonic() - begin:5.1f} s, {job.returncode}: {setting.name} {''.join(seconds)[:150]}", flush=True)


def record_all(settings: Sequence[Setting], folder: Path, gpus: int, until_s: float, limit_s: float) -> None:
    """Record the settings that fit on the GPUs, in their order."""
    waiting = [setting for setting in settings if setting.gpus <= gpus]
    machine, threads = Machine(gpus, until_s), []

    def run(setting: Setting, own: list[int]) -> None:
        try:
            record(setting, own, folder, limit_s)
        finally:
            machine.give_back(setting, own)

    while (found := machine.take(waiting)) is not None:
        threads.append(threading.Thread(target=run, args=found))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print(f"not started: {', '.join(setting.name for setting in waiting) or 'none'}", flush=True)


def measure_machine(folder: Path) -> None:
    """Run ``doctor --measure``, and keep what it says and writes."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(folder.resolve()))
    command = ["timeout", "60", sys.executable, "-m", "zerotop", "doctor", "--measure"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    text = f"{done.stdout}{done.stderr}exit status {done.returncode}\n"
    (folder / "doctor.log").write_text(text)
    print(text, flush=True)


def write_tars(folder: Path) -> None:
    """Write all files as archives of limited size."""
    groups: list[list[Path]] = [[]]
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar"):
        if sum(one.stat().st_size for one in groups[-1]) + path.stat().st_size > _TAR_BYTES:
            groups.append([])
        groups[-1].append(path)
    for number, group in enumerate(groups, 1):
        with tarfile.open(folder / f"what_if-{number}.tar", "w") as archive:
            for path in group:
                archive.add(path, str(path.relative_to(folder)))


def main() -> None:
    """Record, or train in one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("what-if"))
    parser.add_argument("--story", action="store_true", help="the three runs of the 8 B model")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of this machine [4]")
    parser.add_argument("--until", type=float, default=430.0, help="start no training after so many seconds [430]")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose name has it")
    parser.add_argument("--list", action="store_true", help="print the settings")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Setting(**json.loads(options.train)))
        return
    settings = [setting for setting in (STORY if options.story else SETTINGS) if options.only in setting.name]
    if options.list:
        print(*(f"{setting.name}{' (held out)' if setting.name in HELD_OUT else ''}" for setting in settings), sep="\n")
        return
    until_s = time.monotonic() + options.until
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "doctor.log").exists():
        measure_machine(options.folder)
    # DeepSpeed compiles its CPU optimizer once; a training would do it within its time limit.
    build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    with open(options.folder / "build.log", "w") as log:
        builder = subprocess.Popen([sys.executable, "-c", build], stdout=log, stderr=log, start_new_session=True)
        early = [] if options.story else [one for one in settings if one.offload == "none" and one.gpus == 1]
        record_all(early, options.folder, options.gpus, until_s, _LIMIT_S)
        try:
            builder.wait(150)
        except subprocess.TimeoutExpired:
            os.killpg(builder.pid, signal.SIGKILL)
    limit_s = _STORY_LIMIT_S if options.story else _LIMIT_S
    record_all([one for one in settings if one not in early], options.folder, options.gpus, until_s, limit_s)
    write_tars(options.folder)


if __name__ == "__main__":
    main()
