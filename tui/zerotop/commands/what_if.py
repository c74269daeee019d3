"""``zerotop what-if``: the memory and time of a recorded training at another setting."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from zerotop.analysis.sweeps.asked_setting import Changes, answer_changes
from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.what_if_text import format_answer


def what_if(options: argparse.Namespace) -> int:
    """Print the answer, or JSON. Return 0."""
    changes = Changes(**{name: getattr(options, name) for name in Changes.__slots__})
    with open_named(options.recording) as session:
        try:
            base = read_baseline(session)
            answer = answer_changes(base, changes, options.gpu_memory)
        except NoBaselineError as error:
            raise Problem(str(error)) from error
    if options.json:
        setting = answer.setting
        content = {
            "recording": base.name,
            "setting": {"gpus": setting.gpus, "nodes": setting.nodes, **asdict(setting.setup), **asdict(setting.work)},
            "gpu_bytes": answer.gpu_bytes,
            "fits": answer.fits,
            "needed_bytes": answer.memory.needed,
            "memory": asdict(answer.memory),
            "recorded": asdict(answer.recorded),
            "host": {"node_bytes": base.host_bytes, "needed_bytes": answer.host_needed, "fits": answer.fits_host},
            "time": {**asdict(answer.time), "seconds": answer.time.seconds if answer.time.rows else None},
        }
        print(json.dumps(content, indent=1))
    else:
        print(*map(escape_unprintable, format_answer(answer, explain=options.explain)), sep="\n")
    return 0
