"""A running Ray cluster: its workers have the environment of their node's ``ray start``, and what their driver adds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence

from zerotop_probe.outside.job.job import build_environment
from zerotop_probe.outside.sampling.ranks.silent_ranks import is_python

# What ``ray.init`` looks at, and the file that ``ray start`` writes.
_ADDRESS, _FOLDER, _CURRENT = "RAY_ADDRESS", "RAY_TMPDIR", "ray/ray_current_cluster"
# The runtime environment that ``ray.init`` adds to the driver's own, whose variables win with the second one.
_JOB_CONFIG, _DRIVER_WINS = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_OVERRIDE_JOB_RUNTIME_ENV"


def is_for_cluster(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether ``ray.init`` in a Python program would connect to a cluster that runs already."""
    if not is_python(command) or _JOB_CONFIG in environment:
        return False
    if address := environment.get(_ADDRESS):
        return address != "local"
    return os.path.exists(os.path.join(environment.get(_FOLDER, "/tmp"), _CURRENT))


def pass_on(recording: str, names: Iterable[str]) -> None:
    """Have the program's workers on all nodes record. Ray shows these variables in its logs and on command lines."""
    variables = build_environment(recording, {"PYTHONPATH": "${PYTHONPATH}"}, unbuffered=False)  # that of their node
    variables |= {name: os.environ[name] for name in names if name in os.environ}
    os.environ[_JOB_CONFIG] = json.dumps({"runtime_env": {"env_vars": variables}})
    os.environ[_DRIVER_WINS] = "1"
