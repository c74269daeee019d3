"""A loop on a GPU whose author measures memory too: with torch's own peaks, or with torch's own history.

The last thing the rank prints is a line ``COUNTED {...}``. It knows nothing of zerotop.
"""

import argparse
import json
import time

import deepspeed
import torch
from deepspeed.runtime.utils import see_memory_usage

# Allocations of these sizes mark in the history where the phases of a step begin, and where each ends.
MARKS = {"forward": 11, "backward": 12, "step": 13}
END = 14


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resets", action="store_true", help="reset the peaks before each phase, read them after it")
    parser.add_argument("--history", action="store_true", help="record every allocation")
    parser.add_argument("--too-much", type=int, default=0, help="bytes to ask for in the last forward")
    return parser.parse_args()


def make_engine(options):
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.nn.Linear(256, 999))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": True},
        "steps_per_print": 1000000,
    }
    if options.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


class Measured:
    """Brackets a phase with whatever the author measures with."""

    def __init__(self, options):
        self.options = options
        self.peaks = []

    def allocate_mark(self, size):
        if self.options.history:
            torch.empty(size, dtype=torch.uint8, device="cuda")

    def measure_phase(self, name, work):
        # Far enough from other phases that nobody could take them for one.
        torch.cuda.synchronize()
        time.sleep(0.005)
        if self.options.resets:
            torch.cuda.reset_peak_memory_stats()
        self.allocate_mark(MARKS[name])
        time.sleep(0.005)
        result = work()
        self.allocate_mark(END)
        torch.cuda.synchronize()
        if self.options.resets:
            self.peaks.append([name, torch.cuda.max_memory_allocated(), torch.accelerator.max_memory_reserved()])
        return result


def peaks_of(history):
    """(phase, highest sum of requested bytes), starting from zero, between the marks."""
    names = {size: name for name, size in MARKS.items()}
    allocated, found, alive, inside = 0, [], {}, False
    for entry in history:
        if entry["action"] == "alloc":
            if entry["size"] in (*names, END):
                inside = entry["size"] != END
                if inside:
                    found.append([names[entry["size"]], allocated])
                continue
            alive[entry["addr"]] = entry["size"]
            allocated += entry["size"]
        elif entry["action"] == "free_completed":
            allocated -= alive.pop(entry["addr"], 0)
        if inside:
            found[-1][1] = max(found[-1][1], allocated)
    return found


def run_out(engine, batch, size):
    """Asks for more than there is in the middle of a forward, and goes on."""

    def allocate_memory(module, inputs):
        torch.empty(size, dtype=torch.uint8, device="cuda")

    hook = engine.module[1].register_forward_pre_hook(allocate_memory)
    try:
        engine(batch)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
    finally:
        hook.remove()


def main():
    options = parse_options()
    torch.cuda.set_device(0)
    if options.history:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1000000)
    engine, measured = make_engine(options), Measured(options)
    batch = torch.randn(4, 64, 256, device="cuda", dtype=torch.bfloat16)
    for step in range(options.steps):
        if options.too_much and step == options.steps - 1:
            run_out(engine, batch, options.too_much)
        loss = measured.measure_phase("forward", lambda: engine(batch)).float().square().mean()
        measured.measure_phase("backward", lambda loss=loss: engine.backward(loss))
        measured.measure_phase("step", engine.step)
    see_memory_usage("at the end", force=True)
    counted = {"peaks": measured.peaks, "stats": torch.cuda.memory_stats(), "accelerator": torch.accelerator.memory_stats()}
    if options.history:
        counted["history"] = peaks_of(torch.cuda.memory._snapshot()["device_traces"][0])
    print("COUNTED " + json.dumps(counted), flush=True)
    torch.distributed.destroy_process_group()


main()
