"""LoRA on a frozen base, part of which is stored in 8 bits, trained by hand. It knows nothing of zerotop.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, STEPS = 2, 8, 4


class Quantized(torch.nn.Module):
    """A frozen layer of 8-bit weights, each row with a scale of its own."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.detach())

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def main():
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    base.lm_head = Quantized(base.lm_head)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            model.eval()
            model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
            model.train()
    model.save_pretrained("adapter")
    parameters = list(model.parameters())
    counted = {
        "rank": 0,
        "pid": os.getpid(),
        "steps": STEPS,
        "losses": losses,
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "frozen": sum(p.numel() for p in parameters if not p.requires_grad and p.is_floating_point()),
        "quantized": sum(p.numel() for p in parameters if not p.is_floating_point()),
    }
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
