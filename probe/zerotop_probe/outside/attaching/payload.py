"""What is executed inside a rank that is entered or left, and how its answer comes back.

The text runs in the job's own ``__main__``, on its main thread, between two of its instructions. So it leaves no name
behind, raises nothing and returns at once. It imports the probe by file path, as the bootstrap folder does for a job that
``zerotop run`` starts.
"""

from __future__ import annotations

import contextlib
import os

import zerotop_probe
from zerotop_probe.outside import proc
from zerotop_probe.outside.proc import Process

_ROOT = os.path.dirname(os.path.abspath(zerotop_probe.__file__))

_CODE = """
def act(root, answer, action, arguments):
    import os, sys
    raised = None
    try:
        import importlib.util
        package = sys.modules.get("zerotop_probe")
        if package is None:
            path = os.path.join(root, "__init__.py")
            spec = importlib.util.spec_from_file_location("zerotop_probe", path, submodule_search_locations=[root])
            package = importlib.util.module_from_spec(spec)
            sys.modules["zerotop_probe"] = package
            try:
                spec.loader.exec_module(package)
            except BaseException:
                del sys.modules["zerotop_probe"]
                raise
        install = importlib.import_module("zerotop_probe.inside.install")
        said = getattr(install, action)(*arguments)
    except BaseException as error:
        raised = error
        said = "! " + type(error).__name__ + ": " + str(error)
    try:
        descriptor = os.open(answer, os.O_WRONLY)
        os.write(descriptor, said.encode("utf-8", "replace"))
        os.close(descriptor)
    except OSError:
        pass  # nobody waits for it any more
    except BaseException as error:
        raised = error
    if raised is not None and not isinstance(raised, Exception):
        again(raised)


def again(raised):
    # The job's own handler of a signal has raised this, where the job cannot see it: the signal is sent once more.
    import os, signal, threading
    handlers = {getattr(signal.getsignal(number), "__code__", None): number for number in signal.valid_signals()}
    number, trace = signal.SIGINT, raised.__traceback__
    while trace is not None:
        number = handlers.get(trace.tb_frame.f_code, number)
        trace = trace.tb_next
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


act(*CALL)
"""


def text(answer: str, action: str, *arguments: str) -> str:
    """A line of Python that calls ``action`` of ``zerotop_probe.inside.install`` and writes what it said to ``answer``."""
    code = _CODE.replace("CALL", repr((_ROOT, answer, action, arguments)))
    return f"exec({code!r}, {{}})\n"


def answer_path(session: str, process: Process) -> str:
    """Where a process answers: in the session's own folder, for where it cannot write it cannot record either."""
    return os.path.join(os.path.abspath(session), f"answer-{process.pid}-{os.getpid()}")


def expect_answer(path: str) -> None:
    """Makes the file that an answer is written to. While it is not there nobody answers, and nothing is left lying."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))


def take_answer(path: str) -> str | None:
    """What was said, once it is whole; the file is gone then. None so far."""
    said = proc.read(path).decode("utf-8", "replace")
    if not said:
        return None
    forget(path)
    return said


def forget(path: str) -> None:
    """Removes an answer that nobody waits for."""
    with contextlib.suppress(OSError):
        os.unlink(path)
