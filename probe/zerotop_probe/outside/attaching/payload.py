"""What is executed inside a rank that is entered or left, and how its answer comes back.

The text runs in the job's own ``__main__``, on its main thread, between two of its instructions. So it leaves no name
behind, raises nothing and returns at once. It imports the probe by file path, as the bootstrap folder does for a job that
``zerotop run`` starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import zerotop_probe
from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.python_process import CannotEnter, read_status
from zerotop_probe.outside.procfs import Process

_ROOT = os.path.dirname(os.path.abspath(zerotop_probe.__file__))
_libc = ctypes.CDLL(None)

_CODE = """
def act(root, answer, action, arguments):
    import posix, sys  # built in: os and signal may be half imported
    raised = None
    try:
        said = "importing" if importing() else done(root, action, arguments)
    except BaseException as error:
        raised = error
        said = "! " + type(error).__name__ + ": " + str(error)
    try:
        descriptor = posix.open(answer, posix.O_WRONLY)
        posix.write(descriptor, said.encode("utf-8", "replace"))
        posix.close(descriptor)
    except OSError:
        pass  # nobody waits for it any more
    except BaseException as error:
        raised = error
    if raised is not None and not isinstance(raised, Exception):
        again(raised)
    try:
        # Looks after signals, whose mark may have been lost when this was asked for.
        signal = sys.modules.get("_signal")
        if signal is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, ())
    except BaseException as error:
        again(error)


def importing():
    # An import in the midst of an import takes from the job's its lock (CPython before 3.12), or finds half a module.
    import sys
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def done(root, action, arguments):
    import importlib.util, sys
    package = sys.modules.get("zerotop_probe")
    if package is None:
        path = root + "/__init__.py"
        spec = importlib.util.spec_from_file_location("zerotop_probe", path, submodule_search_locations=[root])
        package = importlib.util.module_from_spec(spec)
        sys.modules["zerotop_probe"] = package
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules["zerotop_probe"]
            raise
    install = importlib.import_module("zerotop_probe.inside.hooks.hook_installer")
    return getattr(install, action)(*arguments)


def again(raised):
    # The job's own handler of a signal has raised this, where the job cannot see it: the signal is sent once more.
    import posix, signal, threading
    handlers = {getattr(signal.getsignal(number), "__code__", None): number for number in signal.valid_signals()}
    number, trace = signal.SIGINT, raised.__traceback__
    while trace is not None:
        number = handlers.get(trace.tb_frame.f_code, number)
        trace = trace.tb_next
    threading.Timer(0.05, posix.kill, (posix.getpid(), number)).start()


act(*CALL)
"""


def make_call(answer: str, action: str, *arguments: str) -> str:
    """One line of Python that calls ``action`` of the hook installer and writes its answer to the file ``answer``."""
    code = _CODE.replace("CALL", repr((_ROOT, answer, action, arguments)))
    return f"exec({code!r}, {{}})\n"


def make_script(path: str, text: str) -> str:
    """The content of a script at ``path`` that removes itself and executes ``text``."""
    return f"__import__('posix').unlink({path!r})\n{text}"


def answer_path(session: str, process: Process) -> str:
    """Where a process answers: in the session's own folder, for where it cannot write it cannot record either."""
    return os.path.join(os.path.abspath(session), f"answer-{process.pid}-{os.getpid()}")


def script_path(session: str, process: Process) -> str:
    """Where a process finds what it is asked to execute."""
    return os.path.join(os.path.abspath(session), f"asked-{process.pid}-{os.getpid()}.py")


def create_answer(path: str, process: Process) -> None:
    """Makes the file that an answer is written to. While it is not there nobody answers, and nothing is left lying.

    Raises CannotEnter.
    """
    write_file(path, "", process)


def write_file(path: str, content: str, process: Process) -> None:
    """Makes a file that a process can read and write, if it sees our own folders. Raises CannotEnter."""
    folder = os.path.dirname(path)
    for seen in (_ROOT, folder):
        _check_visible(process.pid, os.path.realpath(seen))
    try:
        with _acting_as_owner(process.pid):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            # Whole or not at all: of a full disk os.write would take what it gets, and half a script would be executed.
            with open(descriptor, "wb") as file:
                file.write(content.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise CannotEnter(
            f"Process {process.pid} cannot write to the recording's folder {folder} ({error.strerror}): choose another one "
            "with --session."
        ) from error


def _check_visible(pid: int, path: str) -> None:
    """Whether a process finds there what we find. In a container or a chroot it may not."""
    with contextlib.suppress(PermissionError):
        try:
            seen = os.path.samestat(os.stat(path), os.stat(f"/proc/{pid}/root{path}"))
        except FileNotFoundError:
            seen = False
        if not seen:
            raise CannotEnter(
                f"Process {pid} has files of its own, as in a container, and {path} is not among them: run zerotop there."
            )


@contextlib.contextmanager
def _acting_as_owner(pid: int) -> Iterator[None]:
    """What this thread makes meanwhile belongs to the user of that process, and is made only where that user may."""
    user, group = (int(read_status(pid).get(name, "0 0 0 0").split()[-1]) for name in ("Uid", "Gid"))
    if user == os.geteuid():
        yield
        return
    try:
        _libc.setfsgid(group)
        _libc.setfsuid(user)
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def take_answer(path: str) -> str | None:
    """What was said, once it is whole; the file is gone then. None so far."""
    said = procfs.read_file(path).decode("utf-8", "replace")
    if not said:
        return None
    remove_file(path)
    return said


def remove_file(path: str) -> None:
    """Removes an answer that nobody waits for."""
    with contextlib.suppress(OSError):
        os.unlink(path)
