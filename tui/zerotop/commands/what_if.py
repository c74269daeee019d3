"""``zerotop what-if``: the memory and time of a recorded training at another setting."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, replace

from zerotop.analysis.sweeps.asked_setting import Changes, answer_changes
from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.estimates import OptionEstimate
from zerotop.analysis.sweeps.grading import build_expectation
from zerotop.analysis.sweeps.ranking import choose_option, find_hardware, rank_recorded
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.estimate_text import format_ranking, recommend
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.what_if_text import format_answer
from zerotop.commands.estimate import read_kept_figures


def what_if(options: argparse.Namespace) -> int:
    """Print the answer, or JSON. Return 0."""
    changes = Changes(**{name: getattr(options, name) for name in Changes.__slots__})
    with open_named(options.recording) as recording:
        try:
            base = read_baseline(recording)
            figures = read_kept_figures()
            if figures is not None and figures.gpu == base.gpu:
                base = replace(base, machine=figures.values)
            answer = answer_changes(base, changes, options.gpu_memory)
            free = changes if options.all else replace(changes, stage=None, offload=None, micro_batch=None)
            ranked = rank_recorded(base, free, options.gpu_memory, all_gpus=options.all)
        except NoBaselineError as error:
            raise Problem(str(error)) from error
    hardware = find_hardware(answer)
    recommendation = recommend(ranked, hardware, _format_command(options, choose_option(ranked, hardware)))
    if options.json:
        setting, seconds = answer.setting, answer.time.seconds if answer.time.rows else None
        content = {
            "recording": base.name,
            "setting": {"gpus": setting.gpus, "nodes": setting.nodes, **asdict(setting.setup), **asdict(setting.work)},
            "gpu_bytes": answer.gpu_bytes,
            "fits": answer.fits,
            "needed_bytes": answer.memory.needed,
            "memory": asdict(answer.memory),
            "recorded": asdict(answer.recorded),
            "host": {"node_bytes": base.host_bytes, "needed_bytes": answer.host_needed, "fits": answer.fits_host},
            "expectation": asdict(build_expectation(setting.setup, setting.work, answer.memory, seconds)),
            "recommendation": recommendation,
            "options": [asdict(option) | {"fits": option.fits(hardware)} for option in ranked] if options.all else [],
            "time": {**asdict(answer.time), "seconds": seconds},
        }
        print(json.dumps(content, indent=1))
        return 0
    lines = [*format_answer(answer, explain=options.explain)]
    if options.all:
        lines = [recommendation, "", *format_ranking(ranked, hardware)]
    else:
        lines.insert(1, recommendation)
    print(*map(escape_unprintable, lines), sep="\n")
    return 0


def _format_command(options: argparse.Namespace, chosen: OptionEstimate | None) -> str:
    """Return the command that explains an option; "" without one."""
    if chosen is None:
        return ""
    asked = {name: getattr(options, name) for name in Changes.__slots__}
    mode = {} if chosen.is_loop else {"stage": chosen.stage, "offload": chosen.offload}
    asked |= {**mode, "micro_batch": chosen.micro_batch, "gpus": chosen.gpus}
    words = [
        word for name, value in asked.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["zerotop", "what-if", options.recording, *words])
