"""``python -m megatron_fused_ce COMMAND``: every command that a user runs, of :data:`COMMANDS`."""

from __future__ import annotations

from importlib import import_module

from megatron_fused_ce import __version__
from megatron_fused_ce.cli.command_line import UsageError, command

#: Name, module with a ``main``, and what it is for.
COMMANDS = {
    "plan": ("plan.command", "memory of a whole training, with and without the flag; needs no GPU"),
    "plan-head": ("plan.head_command", "strategy and chunks of one head; needs no GPU"),
    "compare": ("scripts.runs.compare", "is it the same training? two runs' logs, or one launch twice"),
    "memory": ("scripts.runs.memory", "where did the memory go? one step of a launch, flag off and on"),
    "sweep": ("scripts.runs.sweep", "how many chunks? time against memory, and the flags to use"),
    "selfcheck": ("scripts.runs.selfcheck", "is it right on this machine, and how fast? two minutes"),
    "autoload": ("autoload", "let every launch of this environment know the flag"),
}
HELP = """\
usage: python -m megatron_fused_ce COMMAND ...

Fused chunked cross-entropy for Megatron-LM. To train, add --fused-chunked-ce to a launch.

{commands}

python -m megatron_fused_ce COMMAND --help describes one command; --version prints the version.
"""


@command("megatron_fused_ce")
def main(words: list[str]) -> int:
    """Run one command with the rest of the command line; without one, print help."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        lines = (f"  {command:10} {what}" for command, (_, what) in COMMANDS.items())
        print(HELP.format(commands="\n".join(lines)), end="")
        return 0
    if name == "--version":
        print(f"megatron_fused_ce {__version__}")
        return 0
    if name == "launch":
        raise UsageError("launch is torchrun's module: torchrun ... -m megatron_fused_ce.launch SCRIPT ...")
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r}; there are {', '.join(COMMANDS)}")
    try:
        status: int = import_module(f"megatron_fused_ce.{COMMANDS[name][0]}").main(words[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megatron_fused_ce"):
            raise
        raise UsageError(f"{name} needs {error.name}: pip install {error.name}") from None
    return status


if __name__ == "__main__":
    raise SystemExit(main())
