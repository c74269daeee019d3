"""Differences that are intended, each with its reason."""

_TERMINAL = "stdout and stderr are terminals of zerotop's, which pass everything on; stdin and /dev/tty are the real one"

# By behaviour.
REASONS: dict[str, str] = {
    "the command is a script without #!": "only shells run one; zerotop says what is missing",
    "parent": "zerotop waits for the job, to record how it ended and to tell its caller",
    "variables of the environment that differ from the caller's": "the probe is found by PYTHONPATH, and its recording",
    "what zerotop itself prints, to stderr": "where the recording is",
    "SIGRTMIN+3, sent to the started process alone: deliveries of it and of SIGINT": (
        "with this signal zerotop's viewer asks its sampler to stop the job"
    ),
    "and sent to the started process alone": "zerotop passes the signal on",
    "SIGKILL to the started process alone": "nobody can handle SIGKILL; the job goes on, and can be attached to",
    "SIGSTOP to the started process alone": "nobody can handle SIGSTOP; SIGTSTP stops both",
    "and when that command returns": "zerotop records until the ranks have ended",
    "the name of the terminal: stdin's and stdout's": _TERMINAL,
    "less": "it reads keys from the terminal that it finds at stderr; zerotop run --no-record-output leaves it the real one",
    "an interactive shell as the job": _TERMINAL,
    "SIGCHLD ignored by the caller is ignored in the job": "ignoring it would hide from zerotop how the job ends",
    "given a socket": "zerotop passes the output on through a pipe",
    "given /dev/null": "the output is recorded all the same",
}
