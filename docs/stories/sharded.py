"""One model of 0.95 billion parameters, computed in bf16 and updated in float32, on several ranks.

``fsdp2``: sharded by PyTorch's fully_shard, ``fsdp2-kept`` without freeing parameters after the forward; ``zero3``: by
DeepSpeed; ``ddp``: whole on each rank.
"""

import argparse
import functools
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH = 4, 1024
STEPS = 20


def make_model():
    torch.manual_seed(1)
    if torch.cuda.is_available():
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
        return LlamaForCausalLM(LlamaConfig(**shape))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape))


def train_fsdp2(model, device, batches, *, reshards=True):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model.to(device)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def train_ddp(model, device, batches):
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    for ids in batches:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = ddp(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def train_zero3(model, device, batches):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 1000000,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("fsdp2", "fsdp2-kept", "zero3", "ddp"))
    parser.add_argument("--local_rank", type=int, default=0)
    how = parser.parse_args().how
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = make_model()
    words = model.config.vocab_size
    length = LENGTH if device.type == "cuda" else 32
    batches = (torch.randint(words, (ROWS, length), device=device) for _ in range(STEPS))
    keep = functools.partial(train_fsdp2, reshards=False)
    train = {"fsdp2": train_fsdp2, "fsdp2-kept": keep, "zero3": train_zero3, "ddp": train_ddp}[how]
    loss = train(model, device, batches)
    print(f"rank {rank}: loss {loss.item():.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
