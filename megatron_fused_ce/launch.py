"""Runs an unmodified training script with the flags added to its command line.

::

    torchrun --nproc-per-node 8 -m megatron_fused_ce.launch pretrain_gpt.py ... --fused-chunked-ce

The script sees the command line, ``sys.path`` and ``__main__`` it would see without this module.
"""

from __future__ import annotations

import os
import runpy
import sys

from megatron_fused_ce.adapter import arguments, import_hook
from megatron_fused_ce.cli.command_line import Parser


def run_script(script: str, words: list[str]) -> None:
    """Install the hooks, then run ``script`` as ``python script words...`` would.

    Raises:
        SystemExit: with status 2 when there is no such file, with the script's own otherwise.
    """
    if not os.path.isfile(script):
        print(
            f"megatron_fused_ce.launch: no such script: {script} "
            "(give the path of pretrain_gpt.py or another training script)",
            file=sys.stderr,
        )
        raise SystemExit(2)
    import_hook.install()
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        parser = arguments.add_arguments(Parser("python -m megatron_fused_ce.launch", __doc__ or ""))
        parser.usage = "torchrun ... -m megatron_fused_ce.launch SCRIPT ... --fused-chunked-ce"
        parser.print_help()
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
