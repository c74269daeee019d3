"""Real DeepSpeed runs, each distinct one made once a test session and shared by all tests that look at it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import local_model
import nodes
import operators
import shared_memory
from config_runs import OWN_MODEL, RUNS, SAVE, TOGETHER, WITHOUT_DEEPSPEED, explain_obstacle
from node_jobs import Zerotop, bind_zerotop, start_rank_on
from nodes import Cluster
from real_jobs import (
    EARLY_COMPILER,
    Run,
    finetune_command,
    finetunes_in_turn,
    make_environment,
    prepared_config,
    run_recorded,
)

# Under nohup, and in the background of a script, every child would inherit that they are ignored, and jobs here get them.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    signal.signal(number, handler)

SHARING_RUNS = {"finetune_run", "runs_together"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let one worker have all tests of a file, and one those of all files that look at the same runs of finetune.py.

    Tests that have a group of their own keep it.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    names = {item: item.nodeid.partition("::")[0] for item in items}
    sharing = {names[item] for item in items if SHARING_RUNS & set(getattr(item, "fixturenames", ()))}
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("finetune" if names[item] in sharing else names[item]))


@pytest.fixture(scope="module", autouse=True)
def _shared_memory_given_back() -> Iterator[None]:
    yield
    shared_memory.remove_leftovers()


@pytest.fixture(scope="session", autouse=True)
def _own_operators() -> None:
    operators.build_operators(make_environment())
    operators.use_own_copy()


@pytest.fixture(autouse=True)
def _operators_are_free() -> None:
    operators.remove_locks()


@pytest.fixture(scope="session")
def job_environment(_own_operators: None) -> dict[str, str]:
    """The environment of a real run: CPU, one thread a rank, no network, the tools of this Python on PATH."""
    return make_environment()


@pytest.fixture(scope="session")
def finetune_run(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> Callable[..., Run]:
    """``finetune_run(config, launcher="deepspeed", options=())`` is a real_jobs.Run of finetune.py."""
    made: dict[tuple[str | None, str, tuple[str, ...]], Run] = {}

    def run_config(config: str | None, *, launcher: str = "deepspeed", options: tuple[str, ...] = ()) -> Run:
        key = (config, launcher, options)
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"{config}-{launcher}")
            path = None if config is None else prepared_config(config, folder)
            # Jobs of launchers import everything as they do anywhere else; the sampler hardly sees a shorter one.
            environment = job_environment | EARLY_COMPILER
            made[key] = run_recorded(finetune_command(launcher, path, options), folder, environment)
            shared_memory.remove_leftovers()
        return made[key]

    return run_config


@pytest.fixture(scope="session")
def runs_together(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> dict[str, Run]:
    """The runs of one job, as real_jobs.Run: a config's by its name, those of WITHOUT_DEEPSPEED and OWN_MODEL by these."""
    folder = tmp_path_factory.mktemp("together")
    configs = {
        config: (config, options)
        for config, (launcher, options) in sorted(RUNS.items())
        if launcher == TOGETHER and not explain_obstacle(config)
    }
    # The first one: the Trainer makes the group of ranks without DeepSpeed.
    runs: dict[str, tuple[str | None, Sequence[str]]] = {
        WITHOUT_DEEPSPEED: (None, SAVE),
        **configs,
        OWN_MODEL: ("zero3_bf16", local_model.make_sources(folder)),
    }
    made = finetunes_in_turn(runs, folder, job_environment)
    shared_memory.remove_leftovers()
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two machines with a network and files in common."""
    with nodes.some_nodes(tmp_path_factory.mktemp("cluster")) as both:
        yield both


@pytest.fixture
def call_zerotop(cluster: Cluster, tmp_path: Path) -> Zerotop:
    """The program on the first of them."""
    return bind_zerotop(cluster, tmp_path)


@pytest.fixture
def cluster_job(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """A rank on each node."""
    with start_rank_on(cluster.nodes[0], 0, tmp_path), start_rank_on(cluster.nodes[1], 1, tmp_path):
        yield
