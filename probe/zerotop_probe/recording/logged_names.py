"""What scripts and libraries call the loss, the gradient norm and the learning rate of a training."""

from __future__ import annotations

# How a loss is averaged, and which one it is: "avg_loss", "nll_loss" or "nll" alone.
_AVERAGES = ("train", "training", "total", "avg", "average", "mean", "running", "epoch", "batch", "step")
_KINDS = ("lm", "mlm", "bce", "mse")
_ALONE = ("ce", "xent", "cross_entropy", "nll")
_NAMES = {
    **dict.fromkeys(("loss", *(f"{one}_loss" for one in (*_AVERAGES, *_KINDS, *_ALONE)), *_ALONE), "loss"),
    **dict.fromkeys(("grad_norm", "gradient_norm", "global_grad_norm"), "grad_norm"),
    **dict.fromkeys(("learning_rate", "lr"), "learning_rate"),
}
# Folders of names, as loggers have them: "train/loss". That of an evaluation, "val/loss", is another value.
_FOLDERS = frozenset(("train", "training", "samples"))


def find_column(name: str) -> str | None:
    """Return the column of LOGGED that this name stands for; None for any other value, as the loss of an evaluation."""
    *folders, last = name.strip().lower().replace(" ", "_").split("/")
    if not _FOLDERS.issuperset(folders):
        return None
    if last.startswith("lr-"):  # Lightning's LearningRateMonitor adds the optimizer
        return "learning_rate"
    return _NAMES.get(last.removesuffix("_step"))
