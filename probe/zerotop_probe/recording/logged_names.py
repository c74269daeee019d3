"""What scripts and libraries call the loss, the gradient norm and the learning rate of a training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

_LOSSES = ("loss", "train_loss", "training_loss", "lm_loss")
# Other names of a loss, as "avg_loss", "nll_loss" or "nll" alone: they may be parts of the one above.
_AVERAGES = ("total", "avg", "average", "mean", "running", "epoch", "batch", "step")
_KINDS = ("mlm", "bce", "mse")
_ALONE = ("ce", "xent", "cross_entropy", "nll")
_OTHER_LOSSES = frozenset((*(f"{one}_loss" for one in (*_AVERAGES, *_KINDS, *_ALONE)), *_ALONE))
_NAMES = {
    **dict.fromkeys((*_LOSSES, *_OTHER_LOSSES), "loss"),
    **dict.fromkeys(("grad_norm", "gradient_norm", "global_grad_norm"), "grad_norm"),
    **dict.fromkeys(("learning_rate", "lr"), "learning_rate"),
}
# Folders of names, as loggers have them: "train/loss". That of an evaluation, "val/loss", is another value.
_FOLDERS = frozenset(("train", "training", "samples"))


def find_column(name: str) -> str | None:
    """Return the column of LOGGED that this name stands for; None for any other value, as the loss of an evaluation."""
    *folders, last = _split(name)
    if not _FOLDERS.issuperset(folders):
        return None
    if last.startswith("lr-"):  # Lightning's LearningRateMonitor adds the optimizer
        return "learning_rate"
    return _NAMES.get(last.removesuffix("_step"))


def put_usual_first(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Return names and values with the other names of a loss last: they may be of its parts."""
    return sorted(pairs, key=lambda pair: _split(pair[0])[-1].removesuffix("_step") in _OTHER_LOSSES)


def _split(name: str) -> list[str]:
    return name.strip().lower().replace(" ", "_").split("/")
