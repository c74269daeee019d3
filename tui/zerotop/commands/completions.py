"""``zerotop completions``: a script for a shell's startup file."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode


def completions(options: argparse.Namespace) -> int:
    """Print the script. Return 0."""
    shell = "fish" if options.shell == "fish" else "bash"  # one script is for bash and zsh
    if options.shell == "bash":
        print('# For ~/.bashrc: eval "$(zerotop completions bash)"')
    print(shellcode(["zerotop"], shell=shell))
    return 0
