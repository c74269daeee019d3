"""Loops of PyTorch alone, one for each way of training. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import argparse
import copy
import gc
import hashlib
import json
import os
import threading
import time

import torch
from gloo_threads import finish_gloo_threads
from torch import nn

ROWS, LENGTH, WORDS = 4, 6, 32


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids):
        return self.head(torch.relu(self.layer(self.words(ids))))


class Ids(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.ids = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def compute_loss(logits, ids):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class Counter:
    """What the script itself knows of its run."""

    def __init__(self):
        self.losses, self.forwards, self.facts = [], [], {}

    def note_batch(self, loss, ids):
        self.losses.append(loss.item())
        self.forwards.append(list(ids.shape))


def train_accumulating(counter, rank):
    """DDP where there are several ranks; a loss scaler with one overflow; accumulation, evaluation, checkpoints."""
    model = Model()
    ddp = nn.parallel.DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loader = torch.utils.data.DataLoader(Ids(ROWS * 12, rank), batch_size=ROWS, num_workers=1)
    scales, skipped, evaluations, inner_evaluations = [], [], 0, 0
    for index, ids in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(ddp(ids), ids) / 2
        counter.note_batch(loss, ids)
        scaler.scale(loss).backward()
        if index % 2:
            if index == 5:
                next(ddp.parameters()).grad[0, 0] = float("inf")
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            scales.append([before, scaler.get_scale()])
            skipped.append(scaler.get_scale() < before)
            optimizer.zero_grad()
            schedule.step()
        if index == 7:
            ddp.eval()
            with torch.no_grad():
                for held in torch.utils.data.DataLoader(Ids(ROWS * 2, 9), batch_size=ROWS):
                    compute_loss(ddp(held), held)
                    evaluations += 1
            ddp.train()
            torch.save({"model": model.state_dict()}, f"checkpoint{rank}.pt")
        if index == 9:
            model.eval()
            with torch.no_grad():
                for held in Ids(3, 9).ids:
                    compute_loss(model(held[None]), held[None])
                    inner_evaluations += 1
            model.train()
    counter.facts |= {"scales": scales, "skipped": skipped, "steps": 6}
    counter.facts |= {"evaluations": evaluations, "inner_evaluations": inner_evaluations}
    return model


def train_alternating(counter, rank):
    """A generator and a critic that takes two steps to each of the generator's; two models, two optimizers."""
    generator, critic = nn.Linear(3, 5), nn.Linear(5, 1)
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        for _ in range(2):
            noise = torch.randn(ROWS, 3)
            loss = critic(torch.randn(ROWS, 5)).mean() - critic(generator(noise).detach()).mean()
            second.zero_grad()
            loss.backward()
            second.step()
        loss = -critic(generator(torch.randn(ROWS, 3))).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        counter.losses.append(loss.item())
    counter.facts |= {"steps": 4, "updates": 12}
    return nn.ModuleList([generator, critic])


def train_with_closure(counter, rank):
    """An optimizer that calls a closure several times in each step."""
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    ids = Ids(ROWS, 1).ids

    def compute_gradients():
        optimizer.zero_grad()
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(compute_gradients)
    counter.facts |= {"steps": 3}
    return model


def train_fused(counter, rank):
    """Optimizers that step while the backward goes on, one for each parameter."""
    model = Model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step_parameter(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_parameter)
    ids = Ids(ROWS, 1).ids
    for _ in range(4):
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        loss.backward()
    counter.facts |= {"steps": 4}
    return model


class Stumbling(nn.Module):
    """A model whose third forward, and an optimizer whose fourth step, fail."""

    def __init__(self):
        super().__init__()
        self.model, self.calls = Model(), 0

    def forward(self, ids):
        self.calls += 1
        logits = self.model(ids)
        if self.calls == 3:
            raise ValueError("a bad batch")
        return logits


class StumblingSGD(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 4:
            raise ValueError("a bad step")
        return super().step(closure)


def train_misbehaving(counter, rank):
    """Exceptions in the middle of a step, step() twice, backward in a thread, another model halfway, patched backward."""
    plain_backward = torch.Tensor.backward
    calls = []

    def own_backward(tensor, *args, **kwargs):
        calls.append(tensor.shape)
        return plain_backward(tensor, *args, **kwargs)

    torch.Tensor.backward = own_backward
    model = Stumbling()
    optimizer = StumblingSGD(model.parameters(), lr=0.1)
    torch.optim.Adam([{"params": []}])
    ids = Ids(ROWS, 1).ids
    failures = 0
    for index in range(8):
        if index == 5:
            model = copy.deepcopy(model)
            optimizer = StumblingSGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        try:
            loss = compute_loss(model(ids), ids)
            counter.note_batch(loss, ids)
            if index == 6:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            optimizer.step()
            if index == 1:
                optimizer.step()
        except ValueError:
            failures += 1
    counter.facts |= {"steps": 6, "failures": failures, "backwards": len(calls)}
    torch.Tensor.backward = plain_backward
    return model


def train_without_optimizer(counter, rank):
    """A loop without an optimizer."""
    model = Model()
    ids = Ids(ROWS, 1).ids
    for _ in range(8):
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return model


def run_inference(counter, rank):
    """A program that only looks."""
    model = Model().eval()
    with torch.no_grad():
        counter.losses = [model(Ids(ROWS, index).ids).sum().item() for index in range(5)]
    return model


def train_shared_optimizer(counter, rank):
    """Two models and one optimizer."""
    encoder, decoder = nn.Linear(5, 3), nn.Linear(3, 5)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(4):
        batch = torch.randn(ROWS, 5)
        loss = (decoder(encoder(batch)) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.losses.append(loss.item())
    counter.facts |= {"steps": 4}
    return nn.ModuleList([encoder, decoder])


def train_reloaded(counter, rank):
    """A whole module that is saved and loaded while it trains, as in the middle of a notebook."""
    model, ids = Model(), Ids(ROWS, 1).ids
    for index in range(6):
        if index % 3 == 0:
            torch.save(model, f"module{rank}.pt")
            model = torch.load(f"module{rank}.pt", weights_only=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    counter.facts |= {"steps": 6, "saves": 2}
    return model


def train_mended(counter, rank):
    """An optimizer without parameters that steps now and then, a backward that fails, and a layer that is replaced."""
    model, ids = Model(), Ids(ROWS, 1).ids
    optimizer, empty = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([{"params": []}], lr=0.1)

    def fail(gradient):
        raise ValueError("a bad gradient")

    failures = 0
    for index in range(8):
        optimizer.zero_grad()
        if index == 5:
            model.layer = nn.Linear(8, 8)
            optimizer.add_param_group({"params": model.layer.parameters()})
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        if index == 3:
            loss.register_hook(fail)
        try:
            loss.backward()
        except ValueError:
            failures += 1
            continue
        optimizer.step()
        if index % 2:
            empty.step()
    counter.facts |= {"steps": 7, "failures": failures}
    return model


def train_idle(counter, rank):
    """The only optimizer has no parameters."""
    model, ids = Model(), Ids(ROWS, 1).ids
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    for _ in range(6):
        loss = compute_loss(model(ids), ids)
        counter.note_batch(loss, ids)
        loss.backward()
        empty.step()
    counter.facts |= {"steps": 6}
    return model


def train_distilled(counter, rank):
    """A frozen teacher, with autocast of its own in the last steps, which take longer."""
    model, teacher, ids = Model(), Model(), Ids(ROWS, 1).ids
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        time.sleep(0.6 * (step >= 8))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step >= 8):
            target = teacher(ids).float().detach()
        loss = compute_loss(model(ids) + target, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.losses.append(loss.item())
    return model


def train_in_parts(counter, rank):
    """A model whose parts are called by the loop, the first of them outside of autocast."""
    parts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.AdamW(parts.parameters())
    for _ in range(12):
        hidden = parts[0](torch.ones(ROWS, 16))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for part in parts[1:]:
                hidden = hidden + part(hidden)
        optimizer.zero_grad()
        hidden.float().square().mean().backward()
        optimizer.step()
    return parts


STYLES = {
    "accumulate": train_accumulating,
    "alternate": train_alternating,
    "search": train_with_closure,
    "fuse": train_fused,
    "misbehave": train_misbehaving,
    "descend": train_without_optimizer,
    "infer": run_inference,
    "share": train_shared_optimizer,
    "reload": train_reloaded,
    "mend": train_mended,
    "idle": train_idle,
    "distill": train_distilled,
    "parts": train_in_parts,
}


def train_style(style, rank):
    torch.manual_seed(1)
    counter = Counter()
    model = STYLES[style](counter, rank)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    counted = {
        "rank": rank,
        "pid": os.getpid(),
        "losses": counter.losses,
        "forwards": counter.forwards,
        "weights": hashlib.sha256(weights).hexdigest(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **counter.facts,
    }
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


def main():
    """Train in one style, or in several at once: each in a forked process of its own, as the rank of that number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("styles", choices=STYLES, nargs="+")
    styles = parser.parse_args().styles
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        train_style(styles[0], torch.distributed.get_rank())
        finish_gloo_threads()
        torch.distributed.destroy_process_group()
        return
    gc.freeze()  # each process would go through all of its objects at its end
    for rank, style in enumerate(styles):
        child = os.fork()
        if not child:
            os.environ["RANK"] = str(rank)
            train_style(style, rank)
            return
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


main()
