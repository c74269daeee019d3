"""A loss scaler with a fused optimizer, whose skipped updates are found as on a GPU: from the loss scale alone.

The first argument is how many steps there are; the others are those whose loss is infinite.
"""

import json
import sys
import time

import torch

count, *infinite = (int(text) for text in sys.argv[1:])
hooks = sys.modules.get("zerotop_probe.inside.hooks.loops.optimizer_steps")
if hooks is not None:
    hooks.read_found_inf = lambda optimizer: None

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(count):
    loss = model(torch.randn(4, 8)).square().mean() * (float("inf") if step in infinite else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    time.sleep(0.02)
updates = int(optimizer.state[model[0].weight]["step"].item())
print("COUNTED " + json.dumps({"skipped": count - updates, "loss_scale": scaler.get_scale()}), flush=True)
