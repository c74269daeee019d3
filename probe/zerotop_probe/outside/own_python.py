"""How zerotop's own Pythons start: isolated from what the environment means for the job's Python.

Until a process is isolated it must import nothing but what its interpreter has loaded at start: any other module, of the
standard library too, may be a user's of the same name. Hence this file, and those imported before it, import only these.
"""

import os
import sys

import zerotop_probe

SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(zerotop_probe.__file__)))
# The first argument has the folders to add to the path, after those that Python itself knows.
BOOT_CODE = (
    "import sys; sys.path += [entry for entry in sys.argv.pop(1).split(':') if entry not in sys.path];"
    " from {module} import main; sys.exit(main())"
)
_SOURCES = ("zerotop/cli.py", "zerotop_probe/__init__.py")
# A Python looks at the first even if it is isolated: zerotop's own get its value, for the job, by the other name.
_EXECUTABLE, _KEPT_EXECUTABLE = "PYTHONEXECUTABLE", "PYTHONZEROTOP_EXECUTABLE"
# If these are not installed where an isolated Python looks, they are on the user's path.
_NEEDED = ("psutil", "textual")


def build_command(module, *arguments):
    # type: (str, str) -> list[str]
    """Return the command of an isolated Python that runs ``main`` of a module."""
    return [sys.executable, "-I", "-c", BOOT_CODE.format(module=module), ":".join(_list_own_folders()), *arguments]


def build_bare_command(module, *arguments):
    # type: (str, str) -> list[str]
    """Return the same for a module that needs only the standard library; it starts faster."""
    return [sys.executable, "-I", "-S", "-c", BOOT_CODE.format(module=module), SOURCE_ROOT, *arguments]


def build_environment():
    # type: () -> dict[str, str]
    """Return the environment for a Python of zerotop's own, which restores the user's from it."""
    names = {_EXECUTABLE: _KEPT_EXECUTABLE}
    # Python can read a variable without a name, but not pass it on.
    return {names.get(name, name): value for name, value in os.environ.items() if name}


def _list_own_folders():
    # type: () -> list[str]
    """Return the entries of the path that zerotop needs, and that an isolated Python may lack."""
    others = {getattr(sys.modules.get("site"), "USER_SITE", None)}
    if sys.flags.isolated:
        others.update(_list_user_folders())
    return [
        entry
        for entry in sys.path
        if entry in others or any(os.path.isfile(os.path.join(entry, source)) for source in _SOURCES)
    ]


def _list_user_folders():
    # type: () -> list[str]
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]


def become_isolated():
    # type: () -> None
    """Start this program again, isolated, if a variable of the environment is meant for Python.

    Otherwise forget the folder of the script, or the working directory after ``python -m``.
    """
    restore_environment()
    if sys.flags.isolated:
        _find_dependencies()
    elif _has_python_variables() and sys.executable:
        command = build_command("zerotop.cli", *sys.argv[1:])
        os.execve(command[0], command, build_environment())
    elif not sys.path[0].endswith(".zip"):  # the first of the interpreter's own, which need not exist
        first = sys.path.pop(0)
        if os.path.isfile(os.path.join(first, _SOURCES[0])):
            sys.path.append(first)


def _has_python_variables():
    # type: () -> bool
    return any(name.startswith("PYTHON") and not name.startswith("PYTHONZEROTOP_") for name in os.environ)


def _find_dependencies():
    # type: () -> None
    """Search the folders of PYTHONPATH last, and only if zerotop's dependencies are nowhere else."""
    folders = _list_user_folders()
    if folders:
        from importlib.util import find_spec

        if any(find_spec(name) is None for name in _NEEDED):
            sys.path += folders


def restore_environment():
    # type: () -> None
    """Make the environment what the user has given: without the LC_CTYPE that Python sets itself for want of any locale."""
    if _KEPT_EXECUTABLE in os.environ:
        os.environ[_EXECUTABLE] = os.environ.pop(_KEPT_EXECUTABLE)
    try:
        with open("/proc/self/environ", "rb") as file:
            began = file.read()
    except OSError:
        return
    if b"\0LC_CTYPE=" not in b"\0" + began:
        os.environ.pop("LC_CTYPE", None)
