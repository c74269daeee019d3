"""Gradients that are clipped before they are unscaled: what the probe sees, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.findings import detect_findings
from zerotop_probe.inside.guard import is_wrapped, remove_hooks
from zerotop_probe.inside.hooks.loops.scaled_clipping import ClippingWatch
from zerotop_probe.recording import events

torch = pytest.importorskip("torch")
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_  # by name, before the hooks


@pytest.fixture
def clipping() -> Iterator[ClippingWatch]:
    followed = ClippingWatch()
    followed.install_hooks()
    if not is_wrapped(getattr(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", None)):
        pytest.skip("this version of PyTorch clips in one function")
    yield followed
    assert not remove_hooks()


def _train(clipping: ClippingWatch, steps: int, *, is_only: bool = True, **choices: Any) -> list[dict[str, Any]]:
    """Train for some steps with a scaler; return the facts that would be recorded."""
    model, max_norm = torch.nn.Linear(4, 2), choices.get("max_norm", 1.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    clip: Callable[..., Any] = choices.get("clip", clip_grad_norm_)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        if choices.get("unscales"):
            scaler.unscale_(optimizer)
        if step % choices.get("every", 1) == 0:
            clip(list(model.parameters()), max_norm)
        found.append(clipping.end_update(scaler, optimizer, 1024.0, is_only=is_only))
        scaler.step(optimizer)
        scaler.update()
    return [facts for facts in found if facts is not None]


def test_clipping_before_unscaling_is_found_once(clipping: ClippingWatch) -> None:
    (facts,) = _train(clipping, 9)
    assert (facts["updates"], facts["max_norm"], facts["loss_scale"]) == (3, 1.0, 1024.0)


@pytest.mark.parametrize(
    "choices",
    [
        {"unscales": True},
        {"every": 2},
        {"is_only": False},
        {"max_norm": float("inf")},  # to measure the norm
        {"max_norm": 4096},  # as of one who multiplies it, too
        {"max_norm": torch.tensor(1.0)},
    ],
)
def test_other_clipping_is_no_mistake(clipping: ClippingWatch, choices: dict[str, Any]) -> None:
    assert not _train(clipping, 9, **choices)


def test_clipping_can_still_be_compiled_as_one_graph(clipping: ClippingWatch) -> None:
    def clip(parameters: Any, max_norm: float) -> Any:
        return clip_grad_norm_(parameters, max_norm, foreach=False)

    assert len(_train(clipping, 9, clip=torch.compile(clip, backend="eager", fullgraph=True))) == 1


def test_it_is_told_with_its_line(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    facts = {"step": 3, "updates": 3, "max_norm": 1.0, "loss_scale": 65536.0}
    recording.write_event(
        make_identity(0), 31, events.ScaledClipping, engine=0, file="train.py", line=41, function="main", **facts
    )
    found = detect_findings(recording.open_recording(), BEGIN_NS + 40 * S)
    (told,) = (one for one in found if one.name == "scaled_clipping")
    assert told.headline == "Gradients are clipped before they are unscaled: train.py:41"
    assert "by 65,536: it is at most 1.5e-05 once they are unscaled" in told.details
    assert (told.step, told.fix) == (3, "scaler.unscale_(optimizer)")
