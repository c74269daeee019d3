"""Print as JSON the estimates of DeepSpeed's own functions for each size in the argument, a JSON list.

A process of its own, since torch and DeepSpeed take long to import.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"


def main() -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    found: list[dict[str, Any]] = []
    for size in json.loads(sys.argv[1]):
        where = {"num_gpus_per_node": size["gpus"], "num_nodes": size["nodes"]}
        factor = {"additional_buffer_factor": size["factor"]}
        for cpu in (True, False):
            host, gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(
                size["parameters"], **where, cpu_offload=cpu, **factor
            )
            found.append({**size, "stage": 2, "optimizer": cpu, "weights": False, "zero_init": None, "sizes": [gpu, host]})
        for cpu, weights, zero_init in product((True, False), repeat=3):
            if cpu or not weights:
                options = {"cpu_offload": cpu, "cpu_offload_params": weights, "zero_init": zero_init}
                host, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
                    size["parameters"], size["layer"], **where, **options, **factor
                )
                told = {"stage": 3, "optimizer": cpu, "weights": weights, "zero_init": zero_init, "sizes": [gpu, host]}
                found.append({**size, **told})
    told = {
        "estimates": found,
        "tables": [capture_printed_table(stage3, stage_1_and_2)],
        "layers": count_largest_layers(stage3),
    }
    print(json.dumps(told))


def count_largest_layers(stage3: Any) -> list[int]:
    """The largest layer of a small model, as DeepSpeed counts it and as the probe does."""
    from torch import nn

    from zerotop_probe.inside.facts.engine_facts import _count_largest_layer

    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 40), nn.Sequential(nn.Linear(40, 11), nn.LayerNorm(11)))
    return [stage3.model_to_params(model)[1], _count_largest_layer(SimpleNamespace(module=model))]


def capture_printed_table(stage3: Any, stage_1_and_2: Any) -> str:
    """The tables that DeepSpeed prints, for their rows' names and order."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(10**9, 8, 2)
        stage3.estimate_zero3_model_states_mem_needs_all_cold(10**9, 10**8, 8, 2)
    return printed.getvalue()


if __name__ == "__main__":
    main()
