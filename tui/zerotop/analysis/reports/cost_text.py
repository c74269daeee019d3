"""The cost of a finding, in words."""

from __future__ import annotations

from zerotop.analysis import formatting
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.reports.finding_costs import FindingCost

SHARE_OF = "of the training time"
"""What the share of a finding's cost is of: all iterations, evaluations and checkpoints, and what never became one."""
OVERLAP = "Some findings concern the same time: their shares may overlap."


def describe_cost(cost: FindingCost, view: LiveView, units: formatting.ByteUnits = formatting.BINARY) -> str:
    """Describe a finding's cost: ``60 s, 26 % of the training time, 0.05 GPU hours ($0.19) and 1.2 GiB of GPU memory``.

    ``view``: the job, for its GPUs and the price of an hour.
    """
    parts = []
    if cost.seconds is not None:
        share = "" if cost.share is None else f", {describe_share(cost.share, cost.finding.name)}"
        duration = (
            formatting.format_long_time(cost.seconds) if cost.seconds >= 10 else formatting.format_seconds(cost.seconds)
        )
        # A finding says how long ranks had waited when it was found.
        duration += " in all" if cost.finding.name == "hung_ranks" else ""
        parts.append(f"about {duration}{cost.seconds_text}{share}{_describe_hours(cost.seconds, view)}")
    if cost.bytes is not None:
        parts.append(f"{formatting.format_bytes(cost.bytes, units)} of {'host' if cost.on_host else 'GPU'} memory")
    where = f" on {formatting.format_ranks(cost.ranks)}" if cost.bytes is not None and len(cost.ranks) == 1 else ""
    return " and ".join(parts) + where


def describe_share(share: float, finding: str = "") -> str:
    """Return ``26 % of the training time``; that of the end of a job, in which nothing trains, is of both."""
    return f"{formatting.format_percent(share)} {SHARE_OF}{' and the end' if finding == 'long_end' else ''}"


def _describe_hours(seconds: float, view: LiveView) -> str:
    """Return ``, 0.05 GPU hours ($0.19)``. The whole job waits when one of its ranks does."""
    price = view.job.price
    hours = seconds * len(view.job_gpus) / 3600
    text = f", {hours:,.2f} GPU hours" if hours >= 0.01 else ""
    return text + (f" ({price.format_cost(seconds)})" if price is not None else "")
