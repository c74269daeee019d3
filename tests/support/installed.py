"""The command ``zerotop`` as an installation has it: in a folder with a Python, made of this environment's."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from pathlib import Path

_LAUNCHER = Path(__file__).parents[2] / "tui" / "launcher" / "launcher.c"


@functools.cache
def install_command() -> str:
    """Return the path of the command, which is removed at the end of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="zerotop-installed-"))
    weakref.finalize(install_command, shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    settings = Path(sys.prefix, "pyvenv.cfg")
    if settings.exists():
        shutil.copy(settings, folder)
        (folder / "lib").symlink_to(Path(sys.prefix, "lib"))
    command = folder / "bin" / "zerotop"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    subprocess.run([*shlex.split(compiler), "-std=gnu11", "-Werror", str(_LAUNCHER), "-o", str(command)], check=True)
    return str(command)
