"""What scripts and libraries call the loss, the gradient norm and the learning rate of a training."""

from __future__ import annotations

_NAMES = {
    **dict.fromkeys(("loss", "train_loss", "training_loss", "lm_loss"), "loss"),
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
