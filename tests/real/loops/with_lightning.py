"""PyTorch Lightning on two ranks: accumulation, an evaluation, a checkpoint. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

ROWS, WIDTH, STEPS = 4, 8, 4


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses, self.rows, self.evaluations = [], [], 0

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        self.rows.append(len(batch))
        return loss

    def validation_step(self, batch, index):
        self.evaluations += 1
        self.log("held", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader(count, seed):
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(data, batch_size=ROWS)


def main():
    warnings.simplefilter("ignore")
    lightning.seed_everything(1)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        precision="bf16-mixed",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        val_check_interval=4,
        logger=CSVLogger("logs"),
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, make_loader(ROWS * 2 * 2 * STEPS, 1), make_loader(ROWS * 4, 2))
    trainer.save_checkpoint("model.ckpt")
    counted = {
        "rank": trainer.global_rank,
        "pid": os.getpid(),
        "steps": trainer.global_step,
        "losses": module.losses,
        "rows": module.rows,
        "evaluations": module.evaluations,
        "parameters": sum(p.numel() for p in module.parameters()),
    }
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
