"""The cells of a notebook: LoRA on the architecture of Llama with 7 billion parameters, random weights, in bf16."""

# %%
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

# %%
on_gpu = torch.cuda.is_available()
config = LlamaConfig()  # 32 layers of width 4,096
if not on_gpu:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=100, **shape)
torch.manual_seed(1)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda" if on_gpu else "cpu"):
    base = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)

# %%
began_s = time.monotonic()
while time.monotonic() - began_s < 25:
    ids = torch.randint(config.vocab_size, (4, 512 if on_gpu else 16), device=model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not on_gpu:
        time.sleep(0.02)
print(f"loss {loss.item():.3f}")
