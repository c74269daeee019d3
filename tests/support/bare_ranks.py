"""A launcher that is soon ready: starts the ranks of a script on this machine, with the variables that launchers set.

Arguments: how many ranks, a free port, the script and its arguments. Unlike the others it imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time


def main() -> int:
    ranks, port, *script = sys.argv[1:]
    world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), ranks)
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(int(ranks)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen([sys.executable, "-u", *script], env=os.environ | world | own))
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            for process in processes:  # the others may wait for it
                process.kill()
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode:
            print(f"rank {rank} ended with exit code {process.returncode}", file=sys.stderr)
    return int(any(process.returncode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
