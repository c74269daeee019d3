"""A plain loop with one layer of 500 million weights: first only forwards, then whole steps.

Pauses between the phases let a curve of the memory show each of them.
"""

import time

import torch

PAUSE_S = 0.3


def main():
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    inputs, outputs = (10_000, 50_000) if on_gpu else (100, 500)
    model = torch.nn.Linear(inputs, outputs, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(8, inputs, device=device)
    for _ in range(5):
        model(batch)
        time.sleep(PAUSE_S)
    for step in range(8):
        loss = model(batch).square().mean()
        time.sleep(PAUSE_S)
        loss.backward()
        time.sleep(PAUSE_S)
        optimizer.step()
        time.sleep(PAUSE_S)
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
