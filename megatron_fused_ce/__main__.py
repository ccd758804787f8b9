"""``python -m megatron_fused_ce``: the commands that need no GPU.

::

    python -m megatron_fused_ce plan        # memory of a whole training, with and without the flag
    python -m megatron_fused_ce plan-head   # strategy and chunks of one head
    python -m megatron_fused_ce autoload    # lets every launch of this environment know the flag
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NoReturn

from megatron_fused_ce import __version__

#: Name, module with a ``main``, and what it is for.
COMMANDS = {
    "plan": ("estimate.command", "memory of a whole training, with and without the flag"),
    "plan-head": ("planner", "strategy and chunks of one head"),
    "autoload": ("autoload", "let every launch of this environment know the flag"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"megatron_fused_ce: {message}; there are {', '.join(COMMANDS)}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command with the rest of the command line; without one, print help."""
    parser = _Parser(
        prog="python -m megatron_fused_ce",
        description="Fused chunked cross-entropy for Megatron-LM: commands that need no GPU. "
        "To train, add --fused-chunked-ce to a launch.",
        epilog="python -m megatron_fused_ce COMMAND --help describes one command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron_fused_ce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    # The command reads the words behind its name itself.
    words = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(words[:1]).command
    if command is None:
        parser.print_help()
        return 0
    module = import_module(f"megatron_fused_ce.{COMMANDS[command][0]}")
    status: int = module.main(words[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
