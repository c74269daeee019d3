"""Names and styles of phases, ranks and job properties on all screens."""

from __future__ import annotations

import math

from zerotop.analysis.engine import DEVICE_NAMES, EngineSummary
from zerotop.analysis.formatting import format_count, pluralize
from zerotop.analysis.live_view import Iterations, Job, JobState, LiveView
from zerotop.ui.drawing.formatting import MISSING, format_number, format_range
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.text import sanitize

# Drawing order, from the bottom of a column up.
ITERATION_PHASES = ("data", "forward", "backward", "step", "stages", "other", "unknown")

# Worth mentioning: other processes use at least these cores, and this share of the hosts' cores.
_MIN_OTHER_CORES, _MIN_OTHER_SHARE = 0.5, 0.03
_PHASE_WORDS = {
    "": "starting",
    "other": "outside",
    "unknown": "counted",
    "grads_to_cpu": "grads→cpu",
    "params_to_gpu": "params→gpu",
    "cpu_optimizer": "cpu optim",
    "stage_wait": "stage wait",
    "stage_send": "stage send",
    "checkpoint_save": "ckpt save",
    "checkpoint_load": "ckpt load",
}
_PHASE_STYLES = {
    "init": "phase-init",
    "data": "phase-data",
    "forward": "phase-forward",
    "backward": "phase-backward",
    "reduce": "phase-communication",
    "allgather": "phase-communication",
    "stage_wait": "phase-communication",
    "stage_send": "phase-communication",
    "stages": "phase-communication",
    "step": "phase-step",
    "optimizer": "phase-step",
    "cpu_optimizer": "phase-step",
    "grads_to_cpu": "phase-transfer",
    "params_to_gpu": "phase-transfer",
    "eval": "phase-eval",
    "generate": "phase-eval",
    "unknown": "phase-unknown",
    "checkpoint_save": "phase-checkpoint",
    "checkpoint_load": "phase-checkpoint",
}


def phase_word(phase: str, glyphs: Glyphs) -> str:
    """Return a phase's name in at most ten cells."""
    return glyphs.to_plain(_PHASE_WORDS.get(phase) or sanitize(phase, glyphs))[:10]


def phase_style(phase: str) -> str:
    return _PHASE_STYLES.get(phase, "phase-other")


def describe_no_output(job: Job) -> str:
    """Return the text of an empty output panel."""
    if not job.prints_here:
        return "Not captured; see the job's own terminal"
    return "No output" if job.state.is_over else "No output yet"


def describe_no_ranks(view: LiveView) -> str:
    """Return the text of a list of ranks without any: their processes were not sampled."""
    is_over = view.job.state.is_over or view.is_last_step
    return "No samples of the ranks' processes were recorded" if is_over else "Waiting for ranks"


def rank_name(rank: int, *, short: bool = False) -> str:
    """Return ``rank 3``, or ``3`` if short; a process without a rank number is ``job``."""
    if rank < 0:
        return "job"
    return str(rank) if short else f"rank {rank}"


def format_offload(engine: EngineSummary, glyphs: Glyphs) -> str:
    """Return the offload targets: ``optimizer→CPU``, ``params+optimizer→CPU``; empty without offload."""
    optimizer, parameters = (_format_device(engine.offload_optimizer), _format_device(engine.offload_parameters))
    if optimizer and optimizer == parameters:
        return f"params+optimizer{glyphs.arrow}{optimizer}"
    targets = (("params", parameters), ("optimizer", optimizer))
    return " ".join(f"{name}{glyphs.arrow}{device}" for name, device in targets if device)


def _format_device(device: str | None) -> str:
    return "" if device in (None, "", "none") else DEVICE_NAMES.get(str(device), str(device))


def format_batch(engine: EngineSummary, glyphs: Glyphs, *, short: bool = False) -> str:
    """Return ``micro-batch 2 × accumulation 1 × 8 ranks``, or ``mb2 ga1 ×8`` if short.

    A batch that changed is followed by ``from step 60 on``, if short by ``from 60``.
    """
    if engine.micro_batch is None and engine.gradient_accumulation is None:
        return format_count(engine.ranks, "rank") if engine.ranks else ""
    numbers = (engine.micro_batch, engine.gradient_accumulation, engine.batch_ranks)
    micro, steps, ranks = (str(number) if number is not None else glyphs.to_plain(MISSING) for number in numbers)
    if short:
        since = "" if engine.batch_step is None else f" from {engine.batch_step}"
        return f"mb{micro} ga{steps} {glyphs.times}{ranks}{since}"
    word = pluralize(engine.batch_ranks or 0, "rank" if engine.batch_ranks == engine.ranks else "data-parallel group")
    batch = f" {glyphs.times} ".join((f"micro-batch {micro}", f"accumulation {steps}", f"{ranks} {word}"))
    batch += "" if engine.batch_step is None else f" from step {engine.batch_step} on"
    return ", ".join(filter(None, (batch, engine.stages_text)))


def format_model(engine: EngineSummary) -> str:
    """Return model and size: ``LlamaForCausalLM 8.03B``; empty before the training begins."""
    size = format_number(engine.parameters) if engine.parameters is not None else ""
    return " ".join(part for part in (engine.model or "", size) if part)


def format_ending(job: Job) -> tuple[str, str]:
    """Return (text, style) for a job that is over: ``EXIT 0``, ``KILLED (SIGKILL)`` or ``LOST``; empty while it runs."""
    if not job.state.is_over:
        return "", ""
    word = job.state.value.upper()
    if job.state is JobState.ENDED and job.exit_code is not None:
        word = f"KILLED ({job.exit_signal})" if job.exit_signal else f"EXIT {job.exit_code}"
    badges = {"good": "badge-good", "alert": "badge-bad"}
    return word, badges.get(choose_exit_style(job), "badge-past")


def choose_exit_style(job: Job) -> str:
    """Return the style of a job's end: good, alert, or warn where the exit code is unknown."""
    if job.state is JobState.ENDED and job.exit_code is not None:
        return "alert" if job.exit_code else "good"
    return "alert" if job.state is JobState.LOST else "warn" if job.state is JobState.ENDED else "text"


def find_phases(iterations: Iterations, place: int) -> dict[str, float]:
    """Return the seconds of each phase in the step at a place of the arrays."""
    seconds = {name: float(values[place]) for name, values in iterations.phase_s.items()}
    known = {name: value for name, value in seconds.items() if not math.isnan(value)}
    return {"other": float(iterations.iteration_s[place]) - sum(known.values()), **known}


def format_cores_used(view: LiveView, width: int) -> str:
    """Return ``15.9 of 64 cores``, those that the ranks use of the hosts'; empty before the first sample.

    Where other processes use some too: ``2.0 of 64 cores, host 16.7``, in a narrow panel ``2.0, host 16.7``.
    """
    used, total = sum(host.cores_used for host in view.hosts), sum(host.cores for host in view.hosts)
    ranks = sum(rank.cores_used for rank in view.ranks if rank.alive)
    if not total:
        return ""
    word, host = "host" if len(view.hosts) == 1 else "hosts", format_range([used], 1)
    if not any(rank.alive for rank in view.ranks):
        return f"{word} {host} of {total}"
    text = f"{format_range([ranks], 1)} of {total}{' cores' if width >= 50 else ''}"
    if not used - ranks >= max(_MIN_OTHER_CORES, _MIN_OTHER_SHARE * total):
        return text
    return f"{format_range([ranks], 1)}, {word} {host}" if width < 80 else f"{text}, {word} {host}"


def draw_last_step(view: LiveView) -> Row:
    """Draw, for a title, the step that a view of an ended job is of; nothing for other views."""
    return ((f" at step {view.progress.step}", "muted"),) if view.is_last_step else ()
