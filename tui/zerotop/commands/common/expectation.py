"""``zerotop run --expect``: a prediction that is made before the job starts, and kept beside what it measures."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop_probe.outside import own_python

_HINT = '--expect takes a question: "what-if brisk-otter --stage 3" or "estimate llama-8b --stage 2 --gpus 8"'
_TIMEOUT_S = 60


def ask_expectation(question: str) -> dict[str, Any]:
    """Return the answer to a question, as ``what-if`` and ``estimate`` give it. Raises Problem.

    They run in a process of their own: the one that waits for the job stays small, and without threads.
    """
    try:
        words = shlex.split(question)
    except ValueError as error:
        raise Problem(f"{_HINT}; this one cannot be read: {error}", USAGE) from error
    words = words[1:] if words[:1] == ["zerotop"] else words
    if len(words) < 2 or words[0] not in ("what-if", "estimate"):
        raise Problem(_HINT, USAGE)
    command = own_python.build_command("zerotop.cli", *words, "--json")
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            env=own_python.build_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Problem(f"The prediction for --expect could not be made: {error}") from error
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 0:
        reason = lines[-1].removeprefix("zerotop: ").rstrip(".") if lines else f"exit code {done.returncode}"
        raise Problem(f"Not started, because --expect has no answer: {reason}", USAGE)
    expected: dict[str, Any] | None = json.loads(done.stdout)["expectation"]
    if expected is None:
        raise Problem("Not started: --expect needs one setting. Give estimate --stage and --offload, or --config", USAGE)
    return expected | {"question": shlex.join(words)}
