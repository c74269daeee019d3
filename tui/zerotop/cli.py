"""The entry point of the command. It is ``command_line`` that knows the commands.

Imports nothing else until this process is isolated, see ``own_python``.
"""

from zerotop_probe.outside import own_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run a command, by default that of ``sys.argv``. Return its exit code: the job's, 0, 1 (failed) or 2 (wrong usage)."""
    if argv is None:
        own_python.become_isolated()
    from zerotop import command_line

    return command_line.main(argv)
