"""``zerotop what-if``: the memory and time of a recorded training at another setting."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.what_if import predict_memory
from zerotop.analysis.sweeps.what_if_time import predict_time
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.other_setting import choose_setting
from zerotop.commands.common.what_if_text import WhatIfAnswer, format_answer


def what_if(options: argparse.Namespace) -> int:
    """Print the answer, or JSON. Return 0."""
    with open_named(options.recording) as session:
        try:
            base = read_baseline(session)
            setting = choose_setting(base, options)
            answer = WhatIfAnswer(
                base=base,
                setup=setting.setup,
                work=setting.work,
                gpus=setting.gpus,
                gpu_bytes=options.gpu_memory or base.gpu_bytes,
                recorded=predict_memory(base, base.setup, base.work),
                memory=predict_memory(base, setting.setup, setting.work),
                time=predict_time(base, setting.setup, setting.work, setting.nodes),
            )
        except NoBaselineError as error:
            raise Problem(str(error)) from error
    if options.json:
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
