"""Record the stories of this folder, and pack the recordings.

    python docs/stories/record.py FOLDER [linear] [gpt2] [gpt2-small-batch] [lora] [fsdp2] [fsdp2-kept] [zero3] [ddp]

By default the first four, with two GPUs the others. FOLDER gets NAME.zerotop, and what zerotop says of it:
NAME.log (the job's output), NAME.memory.txt, NAME.findings.txt; for the last four compare.txt. About four minutes on an
H100. Without a GPU everything is small. ``lora`` needs peft and ipykernel, ``zero3`` DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ZEROTOP = [sys.executable, "-m", "zerotop"]
RANKS = 2
SEVERAL = ("zero3", "fsdp2", "fsdp2-kept", "ddp")
ATTACH_AFTER_S = 4.0
LIMIT_S = 400


def list_commands() -> dict[str, list[str]]:
    """Return the command of each story that zerotop starts itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--master_port", "29533"]
    return {
        "linear": [sys.executable, str(HERE / "linear.py")],
        "gpt2": [sys.executable, str(HERE / "gpt2.py")],
        "gpt2-small-batch": [sys.executable, str(HERE / "gpt2.py"), "--batch-size", "1"],
        **{how: [*torchrun, str(HERE / "sharded.py"), how] for how in SEVERAL},
    }


def run_recorded(name: str, command: list[str], folder: Path) -> None:
    """Run a story under ``zerotop run``."""
    with open(folder / f"{name}.log", "wb") as log:
        arguments = [*ZEROTOP, "run", "--headless", "--recording", str(folder / name), "--", *command]
        subprocess.run(arguments, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=True)


def run_notebook(name: str, folder: Path) -> None:
    """Run the cells of the notebook in a kernel, and attach to the kernel while the last of them trains."""
    from jupyter_client import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[:] = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(env=dict(os.environ) | {"JPY_SESSION_NAME": "lora.ipynb"})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT_S)
    *before, last = (HERE / "lora.py").read_text().split("# %%\n")[1:]
    with open(folder / f"{name}.log", "w") as log:
        try:
            for cell in before:
                client.execute_interactive(cell, timeout=LIMIT_S, output_hook=lambda m: note_output(m, log))
            request = client.execute(last)
            time.sleep(ATTACH_AFTER_S)
            pid = str(manager.provisioner.pid)
            attach = [*ZEROTOP, "attach", pid, "--enter", "--headless", "--recording", str(folder / name)]
            attached = subprocess.Popen(attach, stdout=log, stderr=log)
            while client.get_shell_msg(timeout=LIMIT_S)["parent_header"].get("msg_id") != request:
                pass
            subprocess.run([*ZEROTOP, "detach", pid], stdout=log, stderr=log, timeout=LIMIT_S, check=False)
            attached.wait(LIMIT_S)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def note_output(message: dict[str, object], log: object) -> None:
    """Write what a cell printed, or its error, to the log."""
    content = message["content"]
    assert isinstance(content, dict)
    print(content.get("text", ""), *content.get("traceback", ()), sep="\n", end="", file=log)  # type: ignore[call-overload]


def describe_recording(name: str, folder: Path) -> None:
    """Pack a recording, and write what zerotop says of it."""
    packed = folder / f"{name}.zerotop"
    subprocess.run([*ZEROTOP, "pack", str(folder / name), "-o", str(packed)], check=True)
    for command, suffix in (("memory", "memory"), ("findings", "findings")):
        with open(folder / f"{name}.{suffix}.txt", "wb") as file:
            subprocess.run([*ZEROTOP, command, str(packed)], stdout=file, stderr=subprocess.STDOUT, check=False)


def main() -> int:
    names = [*list_commands(), "lora"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stories", nargs="*", choices=[*names, []])
    options = parser.parse_args()
    chosen = options.stories
    if not chosen:
        import torch

        has_two = torch.cuda.device_count() >= RANKS
        chosen = list(SEVERAL) if has_two else ["linear", "gpt2", "gpt2-small-batch", "lora"]
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in chosen:
        begin_s = time.monotonic()
        try:
            if name == "lora":
                run_notebook(name, options.folder)
            else:
                run_recorded(name, list_commands()[name], options.folder)
            describe_recording(name, options.folder)
            state = "recorded"
        except Exception as error:
            failed += 1
            state = f"failed: {error}"
        print(f"{name}: {state}, {time.monotonic() - begin_s:.0f} s", flush=True)
    several = [str(options.folder / f"{name}.zerotop") for name in SEVERAL]
    if all(map(os.path.exists, several)):
        with open(options.folder / "compare.txt", "wb") as file:
            subprocess.run([*ZEROTOP, "compare", *several], stdout=file, stderr=subprocess.STDOUT, check=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
