"""The file that every interpreter under a watched job runs first, in interpreters of several versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zerotop_probe

PACKAGE = Path(zerotop_probe.__file__).parent
BOOTSTRAP = PACKAGE / "bootstrap"


def find_interpreters() -> dict[str, str]:
    """This Python, and whichever others are installed: from before the oldest supported to the newest."""
    found = {"this": sys.executable}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in ("2.7", "3.6", "3.8", "3.9", "3.10", "3.12", "3.13", "3.14"):
        candidates = [str(path) for path in root.glob(f"versions/{version}.*/bin/python")]
        for candidate in filter(None, [*candidates, shutil.which(f"python{version}")]):
            if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
                found[version] = candidate
                break
    return found


FOUND = find_interpreters()
SUPPORTED = {name: path for name, path in FOUND.items() if name not in ("2.7", "3.6", "3.8")}

every_python = pytest.mark.parametrize("python", FOUND.values(), ids=FOUND.keys())
supported_python = pytest.mark.parametrize("python", SUPPORTED.values(), ids=SUPPORTED.keys())


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder of a user's own, on the path and current."""
    made = tmp_path / "job"
    made.mkdir()
    return made


def run_python(
    python: str,
    folder: Path,
    code: str,
    *,
    recording: str | None = None,
    bootstrap: Path | None = BOOTSTRAP,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a child that has the bootstrap first on its path, and the user's folder after it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join(str(entry) for entry in (bootstrap, folder) if entry)
    variables = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}
    if recording is not None:
        variables["PYTHONZEROTOP_SESSION"] = recording
    return subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def stand_in_for_deepspeed(folder: Path, body: str = "") -> None:
    """A package of that name with an engine class; the interpreters of other versions have no DeepSpeed."""
    (folder / "deepspeed" / "runtime").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").touch()
    (folder / "deepspeed" / "runtime" / "__init__.py").touch()
    (folder / "deepspeed" / "runtime" / "engine.py").write_text(
        "class DeepSpeedEngine:\n"
        "    def __init__(self, model): self.model = model\n"
        "    def forward(self, *inputs): return self.model(*inputs)\n" + body
    )


STATE = "import sys; print(sorted(set(sys.modules)), sys.path, [type(f).__name__ for f in sys.meta_path])"


@every_python
@pytest.mark.parametrize("recording", [None, ""])
def test_without_a_recording_the_interpreter_is_as_without_us(python: str, user_folder: Path, recording: str | None) -> None:
    with_us = run_python(python, user_folder, STATE, recording=recording)
    without_us = run_python(python, user_folder, STATE, bootstrap=None)
    assert (with_us.returncode, with_us.stderr) == (0, "")
    assert with_us.stdout == without_us.stdout


@every_python
def test_with_a_recording_no_module_is_imported_for_it_and_nothing_said(
    python: str, user_folder: Path, tmp_path: Path
) -> None:
    code = "import sys; print(sorted(set(sys.modules)), sys.path)"
    with_us = run_python(python, user_folder, code, recording=str(tmp_path))
    without_us = run_python(python, user_folder, code, bootstrap=None)
    assert (with_us.returncode, with_us.stderr) == (0, "")
    assert with_us.stdout == without_us.stdout


def test_the_working_directory_is_not_searched_where_ray_leaves_no_value(user_folder: Path) -> None:
    """As "BOOTSTRAP:${PYTHONPATH}" becomes where that variable is not set; an empty entry means the working directory."""
    script = user_folder.parent / "script.py"
    script.write_text(f"import sys; print({str(user_folder)!r} in sys.path)")
    environment = {"PYTHONPATH": f"{BOOTSTRAP}:", "PYTHONZEROTOP_SESSION": "/nowhere"}
    said = subprocess.run([sys.executable, script], cwd=user_folder, env=environment, capture_output=True, check=True)
    assert said.stdout == b"False\n"


@every_python
@pytest.mark.parametrize("recording", [None, "/nowhere"])
def test_a_sitecustomize_of_the_users_own_takes_our_place(python: str, user_folder: Path, recording: str | None) -> None:
    (user_folder / "sitecustomize.py").write_text("import sys; print('mine'); sys.mine = __name__\n")
    code = "import sys; print(sys.mine); print(sys.modules['sitecustomize'].__file__)"
    done = run_python(python, user_folder, code, recording=recording)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["mine", "sitecustomize", str(user_folder / "sitecustomize.py")]


@every_python
@pytest.mark.parametrize("body", ["1 / 0", "import no_such_module", "raise ImportError('mine', name='x')", "syntax?"])
def test_one_that_fails_fails_as_it_did(python: str, user_folder: Path, body: str) -> None:
    if python == FOUND.get("2.7") and "name=" in body:
        pytest.skip("ImportError takes no name there")
    (user_folder / "sitecustomize.py").write_text(body)
    with_us = run_python(python, user_folder, "print('ran')", recording="/nowhere")
    without_us = run_python(python, user_folder, "print('ran')", bootstrap=None)
    assert (with_us.returncode, with_us.stdout) == (without_us.returncode, without_us.stdout)
    assert with_us.stderr == without_us.stderr


@supported_python
def test_a_users_modules_of_our_names_are_theirs(python: str, user_folder: Path) -> None:
    stand_in_for_deepspeed(user_folder)
    names = ("probe", "tui", "zerotop", "sitecustomize", "inside", "recording")
    for name in names:
        (user_folder / f"{name}.py").write_text("whose = 'mine'\n")
    whose = ", ".join(f"{name}.whose" for name in names)
    code = f"import deepspeed.runtime.engine, {', '.join(names)}\nprint({whose})"
    done = run_python(python, user_folder, code, recording="/nowhere")
    assert (done.stdout.split(), done.stderr) == (["mine"] * len(names), "")


@supported_python
def test_the_probe_is_loaded_by_path_when_the_engine_is_imported_and_not_before(python: str, user_folder: Path) -> None:
    stand_in_for_deepspeed(user_folder)
    code = (
        "import sys\n"
        "print('zerotop_probe' in sys.modules)\n"
        "import deepspeed.runtime.engine as e\n"
        "print(sys.modules['zerotop_probe'].__file__, hasattr(e.DeepSpeedEngine.forward, '__wrapped__'))\n"
        "print(e.__spec__.loader.exec_module.__qualname__, 'zerotop_probe.outside' in sys.modules)\n"
        "print(e.DeepSpeedEngine(lambda x: 2 * x).forward(4))"
    )
    done = run_python(python, user_folder, code, recording="/nowhere")
    assert done.stderr == ""
    init = str(PACKAGE / "__init__.py")
    assert done.stdout.splitlines()[:2] == ["False", f"{init} True"]
    assert done.stdout.splitlines()[2].startswith("_LoaderBasics.exec_module ")
    assert done.stdout.splitlines()[2].endswith(" False")
    assert done.stdout.splitlines()[3] == "8"


@supported_python
def test_without_a_recording_the_engine_is_left_alone(python: str, user_folder: Path) -> None:
    stand_in_for_deepspeed(user_folder)
    code = (
        "import sys, deepspeed.runtime.engine as e\n"
        "print('zerotop_probe' in sys.modules, hasattr(e.DeepSpeedEngine.forward, '__wrapped__'))"
    )
    assert run_python(python, user_folder, code).stdout.split() == ["False", "False"]


@supported_python
def test_an_engine_module_that_fails_to_import_fails_as_it_did(python: str, user_folder: Path) -> None:
    stand_in_for_deepspeed(user_folder, "1 / 0\n")
    code = "try:\n    import deepspeed.runtime.engine\nexcept ZeroDivisionError as e:\n    print('as it did')"
    done = run_python(python, user_folder, code, recording="/nowhere")
    assert (done.stdout, done.stderr) == ("as it did\n", "")


@supported_python
@pytest.mark.parametrize("debug", [False, True])
def test_a_probe_that_cannot_be_loaded_is_silent_unless_asked(
    python: str, user_folder: Path, tmp_path: Path, debug: bool
) -> None:
    alone = tmp_path / "zerotop_probe" / "bootstrap"
    shutil.copytree(BOOTSTRAP, alone)
    stand_in_for_deepspeed(user_folder)
    code = "import deepspeed.runtime.engine; print('trains')"
    more = {"PYTHONZEROTOP_DEBUG": "1"} if debug else {}
    done = run_python(python, user_folder, code, recording="/nowhere", bootstrap=alone, **more)
    assert done.stdout == "trains\n"
    assert ("no probe in deepspeed.runtime.engine" in done.stderr) is debug
    assert debug or done.stderr == ""


def test_child_processes_inherit_the_probe(user_folder: Path) -> None:
    stand_in_for_deepspeed(user_folder)
    child = "import sys, deepspeed.runtime.engine; print('zerotop_probe' in sys.modules)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_python(sys.executable, user_folder, code, recording="/nowhere").stdout == "True\n"


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_interpreters_that_ignore_the_environment_go_unwatched(user_folder: Path, option: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(BOOTSTRAP), "PYTHONZEROTOP_SESSION": "/nowhere"}
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"
    done = subprocess.run([sys.executable, option, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "_Finder" not in done.stdout
