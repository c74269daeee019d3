"""Standard output and standard error."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

from conformance.experiment import make_experiment
from conformance.places import Place, drop_own_lines, read_soon, small_python

BOTH = "for i in 1 2 3; do echo out $i; echo err $i >&2; done"
REOPENED = "for i in 1 2 3 4 5 6 7 8 9 10; do echo line $i > {}; done"


def join_lines(content: bytes) -> str:
    """Return the lines as one, without those of zerotop."""
    return ", ".join(drop_own_lines(content).decode(errors="replace").splitlines()) or "nothing"


@make_experiment(
    "stdout and stderr to two pipes",
    "both to the same pipe: order",
    "both to the same file: order",
    "to a file that is truncated",
    "to a file that is appended to",
    "to two files",
    "to /dev/null",
    "stdout closed by the caller",
    "stderr closed by the caller",
    "both closed by the caller",
    "stderr to stdout's pipe and stdout to a file",
    "inside $( )",
)
def outputs_of_each_kind(place: Place) -> Iterator[str]:
    job = f"Z bash -c '{BOTH}; exit 3'"
    apart = place.run_shell(job)
    yield f"{join_lines(apart.output)}; {join_lines(apart.errors)}"
    yield join_lines(place.run_shell(f"{job} 2>&1").output)
    yield join_lines(place.run_shell(f"{job} > file 2>&1; cat file").output)
    yield join_lines(place.run_shell(f"echo before > file; {job} > file 2> /dev/null; cat file").output)
    yield join_lines(place.run_shell(f"echo before > file; {job} >> file 2> /dev/null; cat file").output)
    place.run_shell(f"{job} > out 2> err")
    yield f"{join_lines((place.work / 'out').read_bytes())}; {join_lines((place.work / 'err').read_bytes())}"
    yield place.run_shell(f"{job} > /dev/null 2>&1").ending
    for closing in (">&-", "2>&-", ">&- 2>&-"):
        done = place.run_shell(f"Z bash -c 'echo out; echo err >&2; exit 3' {closing}")
        lines = [line for line in join_lines(done.output + done.errors).split(", ") if line in ("out", "err")]
        yield f"{' '.join(lines) or 'nothing'}, {done.ending}"
    done = place.run_shell(f"{job} 2>&1 > file; cat file")
    yield join_lines(done.output)
    yield join_lines(place.run_shell(f"echo [$({job} 2> /dev/null)]").output)


@make_experiment(
    "/dev/stdout opened anew, a pipe: every line arrives",
    "/dev/stderr opened anew, a pipe",
    "/proc/self/fd/1 opened anew, a pipe",
    "/dev/stdout opened anew to append, a file",
    "/dev/stdout opened anew to truncate, a file",
    "/dev/stderr opened anew, with stderr as stdout's pipe",
    "a log that is opened with mode w at /dev/stderr, between other lines",
)
def opened_anew(place: Place) -> Iterator[str]:
    for path in ("/dev/stdout", "/dev/stderr", "/proc/self/fd/1"):
        done = place.run_shell(f"Z bash -c '{REOPENED.format(path)}'")
        yield f"{(done.output + done.errors).count(b'line')} lines"
    append = REOPENED.format("/dev/stdout").replace("> /dev", ">> /dev")
    truncate = REOPENED.format("/dev/stdout")
    other = REOPENED.format("/dev/stderr")
    for script in (
        f"Z bash -c '{append}' >> file; cat file",
        f"Z bash -c '{truncate}' > file; cat file",
        f"Z bash -c '{other}' 2>&1 | cat",
    ):
        count = place.run_shell(script).output.count(b"line")
        yield "1 line" if count == 1 else f"{count} lines"
    code = """
import sys
for i in range(3):
    print("step", i, flush=True)
    with open("/dev/stderr", "w") as log: log.write(f"log {i}\\n")
"""
    yield join_lines(place.run_job(*small_python(code), stderr=subprocess.STDOUT).output)


@make_experiment("the kind of stdout that the job sees, given a pipe", "given a file", "given a socket", "given /dev/null")
def seen_kinds(place: Place) -> Iterator[str]:
    for target in ("| cat", "> file; cat file", "socket", "> /dev/null; cat seen"):
        code = (
            "import os, stat; mode = os.fstat(1).st_mode; names = {stat.S_IFIFO: 'a pipe', stat.S_IFREG: 'a file',"
            " stat.S_IFSOCK: 'a socket', stat.S_IFCHR: 'a device'}; name = names[stat.S_IFMT(mode)];"
            " open('seen', 'w').write(name); print(name)"
        )
        if target == "socket":
            yield read_socket(place, *small_python(code))
            continue
        (place.work / "code").write_text(code)
        yield join_lines(place.run_shell(f"Z python -S -E code {target}").output)


def read_socket(place: Place, *job: str) -> str:
    """Run a job whose stdout is a socket; return what came through it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place.run_job(*job, stdout=theirs.fileno())
        theirs.close()
        received = b""
        while data := ours.recv(1 << 16):
            received += data
    return join_lines(received)


@make_experiment(
    "carriage returns and escapes",
    "all byte values, not UTF-8",
    "no newline at the end",
    "20,000 writes of one byte",
    "one write of 200 KB",
    "two processes that write lines of 4,000 bytes at once",
    "50 children that print a line each",
    "lines of stdout and stderr in turn, to one pipe",
    "nothing at all",
)
def observe_contents(place: Place) -> Iterator[str]:
    def pass_through(code: str, expected: bytes, **options: int) -> str:
        output = place.run_job(*small_python(f"import os\n{code}"), **options).output
        return f"{len(expected):,} bytes as written" if output == expected else f"{len(output):,} bytes, others"

    yield pass_through(r"os.write(1, b'10%\r50%\r100%\x1b[2K\r\n')", b"10%\r50%\r100%\x1b[2K\r\n")
    yield pass_through("os.write(1, bytes(range(256)) * 9)", bytes(range(256)) * 9)
    yield pass_through("os.write(1, b'the end')", b"the end")
    yield pass_through("for i in range(20000): os.write(1, b'%d' % (i % 10))", b"0123456789" * 2000)
    yield pass_through("os.write(1, b'0123456789abcdef' * 12500)", b"0123456789abcdef" * 12500)
    code = """
children = [os.fork() for _ in range(1)]
letter = b"a" if children[0] else b"b"
for i in range(100): os.write(1, letter * 3999 + b"\\n")
if children[0]: os.waitpid(children[0], 0)
"""
    lines = place.run_job(*small_python(f"import os\n{code}")).output.splitlines()
    whole = sum(line in (b"a" * 3999, b"b" * 3999) for line in lines)
    yield f"{whole} of {len(lines)} lines are whole"
    done = place.run_job("bash", "-c", "for i in {1..50}; do echo child $i & done; wait")
    yield f"{len(set(done.output.splitlines()))} lines"
    turns = b"".join(b"line %d\n" % i for i in range(500))
    yield pass_through("for i in range(500): os.write(1 + i % 2, b'line %d\\n' % i)", turns, stderr=subprocess.STDOUT)
    yield pass_through("pass", b"")


@make_experiment(
    "stdout made non-blocking by the job",
    "a stdout that the caller has made non-blocking",
    "a prompt without newline arrives before the job goes on",
    "what was printed is in the file when the command has ended",
    "what zerotop itself prints, to stderr",
)
def observe_manners(place: Place) -> Iterator[str]:
    code = """
import os
os.set_blocking(1, False)
written = 0
try:
    while written < 1 << 22: written += os.write(1, b"x" * 4096)
except BlockingIOError: os.write(2, b"the pipe is full")
"""
    with place.start_job(*small_python(code)) as process:
        yield read_soon(process.stderr, 16).decode() or "never full"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb") as reader:
        code = "import os\nfor i in range(100):\n    try: os.write(1, b'x' * 100)\n    except BlockingIOError: pass"
        place.run_job(*small_python(code), stdout=writing)
        os.close(writing)
        yield f"{len(reader.read()):,} bytes"
    with place.start_job("bash", "-c", "printf 'ready? '; read x; echo $x", stdin=subprocess.PIPE) as process:
        yield repr(read_soon(process.stdout, 7).decode())
    yield place.run_shell("Z seq 100000 > file; stat -c %s file").output.decode().strip() + " bytes"
    own = place.run_job("true").raw_errors.decode().replace(str(place.folder), "").splitlines()
    yield "; ".join(line.split(" in ")[0] for line in own) or "nothing"
