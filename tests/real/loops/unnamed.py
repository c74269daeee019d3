import time

import torch

kept = []
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def pause():
    time.sleep(0.1)


torch.set_num_threads(1)
for _ in range(90):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.ones(3 << 20))
    pause()
raise ValueError("planned")
