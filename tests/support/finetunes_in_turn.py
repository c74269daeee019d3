"""Run by a launcher: finetune.py several times in one process, each time as if it were the only one.

Arguments: one folder for each run. Its ``arguments.json`` holds the command line; the run's working directory and its
TMPDIR are in there, its output goes to ``output``, and each rank's exit code to ``exit-RANK``. A run that fails ends the
process: the other ranks may wait for it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from zerotop.demo import finetune


def redirect_output(path: Path) -> None:
    """Let standard output and standard error continue in this file, which the ranks share."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def finetune_in(folder: Path) -> int:
    """Run finetune.py; return its exit code."""
    redirect_output(folder / "output")
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    sys.argv = ["finetune.py", *json.loads((folder / "arguments.json").read_text())]
    environment = dict(os.environ)
    try:
        return finetune.main()
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        # What the Trainer and Accelerate keep for the whole process.
        os.environ.clear()
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        gc.collect()


def main() -> int:
    folders = [Path(argument) for argument in sys.argv[1:]]
    # DeepSpeed remembers groups of ranks for the whole process: they end with the last run only.
    destroy: Callable[[], None] = torch.distributed.destroy_process_group
    for folder in folders:
        torch.distributed.destroy_process_group = destroy if folder == folders[-1] else lambda: None
        code = finetune_in(folder)
        (folder / f"exit-{os.environ['RANK']}").write_text(str(code))
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
