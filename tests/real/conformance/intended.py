"""Differences that are intended, each with its reason."""

_REQUESTS = "with these signals zerotop's own processes ask each other to stop the job or to leave it"

# By behaviour.
REASONS: dict[str, str] = {
    "parent": "zerotop waits for the job, to record how it ended and to tell its caller",
    "variables of the environment that differ from the caller's": "the probe is loaded by PYTHONPATH, and finds its recording",
    "what zerotop itself prints, to stderr": "where the recording is",
    "SIGRTMIN+3, +4, +5, sent to the process group: deliveries": _REQUESTS,
    "SIGRTMIN+3, +4, +5, sent to every process of the tree: deliveries": _REQUESTS,
    "SIGRTMIN+3, +4, +5, sent to the started process alone: deliveries": _REQUESTS,
    "and sent to the started process alone": "zerotop passes the signal on",
    "SIGKILL to the started process alone": "nobody can handle SIGKILL; the job goes on, and `zerotop attach` records it again",
    "SIGSTOP to the started process alone": "nobody can handle SIGSTOP; SIGTSTP stops both",
    "and when that command returns": "zerotop records until the ranks have ended",
}
