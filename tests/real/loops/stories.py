"""Loops without DeepSpeed whose memory people ask about, measured by themselves too. It knows nothing of zerotop.

``linear``: one ``nn.Linear(10_000, 50_000)``, forward, backward and AdamW. ``trainer``: the Hugging Face Trainer on GPT-2
with random weights and the default batch size. ``scaler``: fp16 with overflows, by a plain and by a fused optimizer.
``graphs``: CUDA graphs, those of torch.compile and one of a whole step. The last thing the rank prints is a line
``COUNTED {...}``. ``--small`` is for a machine without a GPU.
"""

import argparse
import copy
import json
import os
import time

import torch


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("story", choices=("linear", "trainer", "scaler", "graphs"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default="output_dir")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds at the end, for NVML to see what is held")
    return parser.parse_args()


class Measured:
    """The peaks that torch itself reports for each phase."""

    def __init__(self, device):
        self.on_gpu = device == "cuda"
        self.peaks = []

    def measure_phase(self, name, work):
        if not self.on_gpu:
            return work()
        torch.cuda.synchronize()
        time.sleep(0.005)
        torch.cuda.reset_peak_memory_stats()
        time.sleep(0.005)
        result = work()
        torch.cuda.synchronize()
        self.peaks.append([name, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        return result


def train_linear(options, device):
    inputs, outputs = (100, 500) if options.small else (10_000, 50_000)
    model = torch.nn.Linear(inputs, outputs, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    measured, losses = Measured(device), []
    batch = torch.randn(8, inputs, device=device)
    for _ in range(options.steps):
        optimizer.zero_grad()
        output = measured.measure_phase("forward", lambda: model(batch))
        loss = output.square().mean()
        measured.measure_phase("backward", loss.backward)
        measured.measure_phase("step", optimizer.step)
        losses.append(loss.item())
    time.sleep(options.linger)
    return {"losses": losses, "peaks": measured.peaks, "parameters": sum(p.numel() for p in model.parameters())}


def train_scaled(options, device):
    losses, scales, skipped = [], [], []
    for fused in (False, True):
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        # The first scales overflow fp16.
        scaler = torch.amp.GradScaler(device, init_scale=2.0**22, growth_interval=3)
        batch = torch.randn(16, 32, device=device)
        for _ in range(12):
            with torch.autocast(device, dtype=torch.float16):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            scales.append([before, scaler.get_scale()])
            skipped.append(scaler.get_scale() < before)
    return {"losses": losses, "scales": scales, "skipped": skipped}


def train_captured(options, device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")
    batch, losses = torch.randn(16, 32, device=device), []

    def run_step(call):
        optimizer.zero_grad()
        loss = call(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = torch.compile(model, backend="eager") if options.small else torch.compile(model, mode="reduce-overhead")
    losses += [run_step(compiled).item() for _ in range(8)]
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    if device == "cuda":
        # A model of its own: torch.compile's graphs keep nodes of the backward, which would forbid another capture.
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run_step(model)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = run_step(model)
        for _ in range(5):
            graph.replay()
            losses.append(loss.item())
    return {"losses": losses, "skips": skips, "steps": 12}


class Blocks(torch.utils.data.Dataset):
    def __init__(self, count, length, words):
        self.ids = torch.randint(words, (count, length), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train_gpt2(options, device):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    length = 32 if options.small else 1024
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100) if options.small else GPT2Config()
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    trainer = Trainer(model, arguments, train_dataset=Blocks(8 * options.steps, length, config.vocab_size))
    trainer.train()
    time.sleep(options.linger)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "steps": trainer.state.global_step,
        "tokens": 8 * length * options.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "logits_bytes": 8 * length * config.vocab_size * 4,
    }


def main():
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    stories = {"linear": train_linear, "trainer": train_gpt2, "scaler": train_scaled, "graphs": train_captured}
    counted = {"rank": 0, **stories[options.story](options, device)}
    if device == "cuda":
        counted["stats"] = torch.cuda.memory_stats()
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
