"""The code executed inside a rank to load or unload the probe, and how its answer is returned.

The code runs in the job's own ``__main__`` on its main thread, between two of its instructions. So it leaves no name behind,
raises nothing and returns at once. It imports the probe by file path, as the bootstrap folder does for ``zerotop run``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import zerotop_probe
from zerotop_probe.outside.attaching.entry_limits import read_status
from zerotop_probe.outside.attaching.python_process import CannotEnter
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording.plain_files import open_plain_file

_MAX_ANSWER_BYTES = 1 << 16
_ROOT = os.path.dirname(os.path.abspath(zerotop_probe.__file__))
_libc = ctypes.CDLL(None)

_CODE = """
def act(root, answer, action, arguments):
    import posix, sys  # built in: os and signal may be half imported
    raised = None
    try:
        reply = "importing" if importing() else call_probe(root, action, arguments)
    except BaseException as error:
        raised = error
        reply = "! " + type(error).__name__ + ": " + str(error)
    try:
        descriptor = posix.open(answer, posix.O_WRONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK)
        posix.write(descriptor, reply.encode("utf-8", "replace"))
        posix.close(descriptor)
    except OSError:
        pass  # the caller has gone
    except BaseException as error:
        raised = error
    if raised is not None and not isinstance(raised, Exception):
        send_again(raised)
    try:
        # Handle pending signals: requesting this script may have cleared their flag.
        signal = sys.modules.get("_signal")
        if signal is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, ())
    except BaseException as error:
        send_again(error)


def importing():
    # Importing during an import takes away its lock (CPython before 3.12), or finds a partly initialized module.
    import sys
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def call_probe(root, action, arguments):
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
    own_imports = importlib.import_module("zerotop_probe.inside.own_imports")
    return getattr(own_imports.import_hook_installer(), action)(*arguments)


def send_again(raised):
    # A signal handler of the job raised this where the job cannot see it, so the signal is sent again.
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
    """Return a line of Python that calls ``action`` of the hook installer and writes the answer to the file ``answer``."""
    code = _CODE.replace("CALL", repr((_ROOT, answer, action, arguments)))
    return f"exec({code!r}, {{}})\n"


def make_script(path: str, text: str) -> str:
    """Return the content of a script at ``path`` that removes itself and executes ``text``."""
    return f"__import__('posix').unlink({path!r})\n{text}"


def answer_path(recording: str, process: ProcessHandle) -> str:
    """Return the path of a process's answer: in the recording, since it must be able to write there in any case."""
    return os.path.join(os.path.abspath(recording), f"answer-{process.pid}-{os.getpid()}")


def script_path(recording: str, process: ProcessHandle) -> str:
    """Return the path of the script for a process."""
    return os.path.join(os.path.abspath(recording), f"asked-{process.pid}-{os.getpid()}.py")


def create_answer(path: str, process: ProcessHandle) -> None:
    """Create the empty answer file; processes only answer to a file that exists. Raises CannotEnter."""
    write_file(path, "", process)


def write_file(path: str, content: str, process: ProcessHandle) -> None:
    """Create a file that a process can read and write. Raises CannotEnter, also if it cannot see our folders."""
    folder = os.path.dirname(path)
    for needed in (_ROOT, folder):
        _check_visible(process.pid, os.path.realpath(needed))
    try:
        with _acting_as_owner(process.pid):
            remove_file(path)  # left by a command whose pid is reused
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Raises if it cannot write everything; os.write would truncate the script on a full disk.
            with open(descriptor, "wb") as file:
                file.write(content.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise CannotEnter(
            f"Process {process.pid} cannot write to the recording's folder {folder} ({error.strerror}). Choose another "
            "folder with --recording."
        ) from error


def _check_visible(pid: int, path: str) -> None:
    """Raise CannotEnter if a process, such as one in a container, has another file at ``path`` than we have."""
    with contextlib.suppress(PermissionError):
        try:
            is_same = os.path.samestat(os.stat(path), os.stat(f"/proc/{pid}/root{path}"))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise CannotEnter(
                f"Process {pid} does not see {path}, as it runs in a container or chroot. Run zerotop inside it."
            )


@contextlib.contextmanager
def _acting_as_owner(pid: int) -> Iterator[None]:
    """Access files as the user of that process in this thread, with that user's permissions and ownership."""
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
    """Return the answer and remove its file; None while there is no answer."""
    answer = _read_plain_file(path).decode("utf-8", "replace")
    if not answer:
        return None
    remove_file(path)
    return answer


def _read_plain_file(path: str) -> bytes:
    try:
        descriptor = open_plain_file(path)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        return file.read(_MAX_ANSWER_BYTES)


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(path)
