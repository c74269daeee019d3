"""zerotop's own Pythons: which modules they load, and that a job's environment does not reach them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from installed import install_command
from programs import ZEROTOP, make_environment

# The modules that a Python has loaded before it runs a program: with others it does not start.
LIST_LOADED = "import sys\nprint(*sys.modules)"
COMMANDS = {
    "version": ("--version",),
    "doctor": ("doctor", "--json"),
    "recordings": ("recordings", "--json"),
    "attach": ("attach", "--json"),
    "run": ("run", "--headless", "--", "sh", "-c", "echo word; exit 3"),
}


def write_modules(folder: Path, loaded: str) -> Path:
    """Make a module of every other name in the standard library; each prints its name and ends the process."""
    folder.mkdir(parents=True)
    for name in sys.stdlib_module_names - set(loaded.split()):
        (folder / f"{name}.py").write_text(f"print('own {name}', flush=True)\nraise SystemExit({name!r})")
    return folder


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], Path]]:
    """Return the ways to start zerotop, each with a folder of modules that must not disturb it."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "list_loaded.py").write_text(LIST_LOADED)
    found = []
    for command, lister in ([install_command()], ["-I", "-c", LIST_LOADED]), (ZEROTOP, ["-m", "list_loaded"]):
        loaded = subprocess.run([sys.executable, *lister], cwd=folder, capture_output=True, text=True, check=True).stdout
        found.append((command, write_modules(folder / lister[0] / "modules", loaded)))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_no_module_of_the_user_replaces_one_of_the_standard_library(
    tmp_path: Path, name: str, ways: list[tuple[list[str], Path]]
) -> None:
    for command, modules in ways:
        environment = make_environment(tmp_path)
        words = [*command, *COMMANDS[name]]
        plain = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, check=False)
        for options in ({"PYTHONPATH": str(modules)}, {}):
            folder = tmp_path if options else modules
            done = subprocess.run(words, env=environment | options, cwd=folder, capture_output=True, check=False)
            assert b"own " not in done.stdout + done.stderr, done
            assert (done.returncode, b"Traceback" in done.stderr) == (plain.returncode, False), done.stderr.decode()


def test_dependencies_on_pythonpath_are_found_if_they_are_nowhere_else(tmp_path: Path) -> None:
    """As with modules of a cluster: then, and only then, its folders are searched, after all others."""
    root = Path(__file__).parents[2]
    site = next(entry for entry in sys.path if entry.endswith("site-packages"))
    (tmp_path / "json.py").write_text("raise SystemExit('own json')")
    code = "import sys; from zerotop.cli import main; sys.exit(main())"
    folders = [str(tmp_path), str(root / "tui"), str(root / "probe"), site]
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-c", code, "run", "--headless", "--", "sh", "-c", "echo word; exit 3"],
        env=make_environment(tmp_path, PYTHONPATH=":".join(folders)),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, b"word\n"), done.stderr.decode()


def test_the_job_gets_its_variables_back(tmp_path: Path) -> None:
    """Also without any locale, where Python sets LC_CTYPE for itself, and from the agent in the background."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONEXECUTABLE": "/nowhere/python",
        "PYTHONHOME": "/no",
    }
    for command in (["--headless"], []):
        report = tmp_path / f"variables{len(command)}"
        job = ["--", "sh", "-c", f"tr '\\0' '\\n' < /proc/self/environ > {report}"]
        code = (
            "import sys; from zerotop_probe.outside import own_python; from zerotop_probe.outside.job import agent;"
            " from zerotop_probe.recording import directory; own_python.restore_environment();"
            " recording = directory.create_recording(sys.argv[2:], path=sys.argv[1]);"
            " agent.launch_in_background(recording, sys.argv[2:])"
        )
        if command:
            arguments = [install_command(), "run", *command, *job]
        else:
            arguments = [sys.executable, "-I", "-c", code, str(tmp_path / "recording"), *job[1:]]
        given = (
            environment if command else {name: value for name, value in environment.items() if name != "PYTHONEXECUTABLE"}
        )
        subprocess.run(arguments, env=given, check=True, capture_output=True, timeout=60)
        found = wait_for_variables(report)
        added = {"PYTHONPATH", "PYTHONZEROTOP_SESSION", "PWD", *([] if command else ["PYTHONUNBUFFERED"])}
        assert {name: value for name, value in found.items() if name not in added} == given


def wait_for_variables(path: Path) -> dict[str, str]:
    for _ in range(200):
        if path.exists() and path.read_text():
            break
        subprocess.run(["sleep", "0.05"], check=True)
    return dict(line.split("=", 1) for line in path.read_text().splitlines())
