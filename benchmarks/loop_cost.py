"""The cost of the probe in a loop without DeepSpeed, per phase boundary and per micro-step.

    python benchmarks/loop_cost.py [--steps 400] [--accumulation 1] [--width 256] [--device cuda] [--cold]

As probe_cost.py, of which it uses the blocks: paired blocks of one loop of PyTorch alone, with the probe's hooks and without
them. ``--cold``: before every phase the loop walks over 50 MB and 20,000 Python objects, so that nothing of the probe is in
the processor's caches.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import probe_cost


def main() -> None:
    options = parse_options()
    if "RANK" not in os.environ:
        raise SystemExit(probe_cost.start_rank(options.budget))
    probe_cost.measure_blocks(options, Loop(options), make_switch)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all [400]")
    parser.add_argument("--block", type=int, default=10, help="steps in a block [10]")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps in a step [1]")
    parser.add_argument("--width", type=int, default=256, help="of the model's layers [256]")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--cold", action="store_true", help="evict the probe from the processor's caches before every phase")
    parser.add_argument("--megabytes", type=int, default=50, help="that --cold walks over: less makes shorter steps [50]")
    parser.add_argument("--cpu-time", action="store_true", help="of the training thread: for a busy machine without a GPU")
    parser.add_argument("--budget", default="100", help="in percent; 100: every step in full detail [100]")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


class Loop:
    """A loop with the methods of an engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        layers = [torch.nn.Linear(options.width, options.width) for _ in range(4)]
        self.device = options.device
        self.model = torch.nn.Sequential(torch.nn.Embedding(1000, options.width), *layers).to(self.device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._accumulation = options.accumulation
        self._micro_steps = 0
        self._memory = torch.zeros((options.megabytes << 20) // 4 if options.cold else 0)
        self._objects = [[number] for number in range(options.megabytes * 400 if options.cold else 0)]

    def _evict_caches(self) -> None:
        self._memory.add_(1)
        assert sum(map(len, self._objects)) == len(self._objects)

    def __call__(self, ids: Any) -> Any:
        self._evict_caches()
        return self.model(ids)

    def backward(self, loss: Any) -> None:
        self._evict_caches()
        loss.backward()

    def step(self) -> None:
        self._evict_caches()
        self._micro_steps += 1
        if self._micro_steps % self._accumulation == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._evict_caches()  # before the next batch is fetched


def make_switch(loop: Loop) -> Callable[[bool], None]:
    """Return a function that takes the probe's hooks out of this process and puts them back."""
    import torch
    import torch.utils.data.dataloader as data
    from torch.optim import optimizer as optimizers

    root = vars(loop.model)
    call = root["_compiled_call_impl"]
    backwards = [(owner, owner._engine_run_backward) for owner in (torch.autograd, torch.autograd.graph)]
    hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    kept = [dict(registered) for registered in hooks]
    fetch = data._BaseDataLoaderIter.__next__
    assert all(kept), "the probe is not installed here"

    def turn_hooks(on: bool) -> None:
        for owner, wrapper in backwards:
            owner._engine_run_backward = wrapper if on else wrapper.__wrapped__
        for registered, own in zip(hooks, kept, strict=True):
            registered.clear()
            registered.update(own if on else {})
        data._BaseDataLoaderIter.__next__ = fetch if on else fetch.__wrapped__
        if on:
            root["_compiled_call_impl"] = call
        else:
            root.pop("_compiled_call_impl", None)

    return turn_hooks


if __name__ == "__main__":
    main()
