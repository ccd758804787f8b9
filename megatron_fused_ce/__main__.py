"""``python -m megatron_fused_ce``: the commands that need no GPU.

::

    python -m megatron_fused_ce plan       # what a whole training holds with each way of computing the loss
    python -m megatron_fused_ce planner    # strategy and chunks of one head
    python -m megatron_fused_ce autoload   # the flag in every launch of this environment
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NoReturn

#: Name, module with a ``main``, and what it is for.
COMMANDS = {
    "plan": (
        "estimate.command",
        "predict what a training holds with each way of computing the loss",
    ),
    "planner": ("planner", "choose strategy and chunks for one head"),
    "autoload": ("autoload", "let every launch of this environment know the flag"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"megatron_fused_ce: {message}; there are {', '.join(COMMANDS)}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command with the rest of the command line."""
    parser = _Parser(prog="python -m megatron_fused_ce", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    # The command reads what comes behind its name itself.
    words = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(words[:1]).command
    module = import_module(f"megatron_fused_ce.{COMMANDS[command][0]}")
    status: int = module.main(words[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
