"""Start a launch early: import what it needs, wait for its turn, then run it as it would have run.

    torchrun ... scripts/launch_preloaded.py TURN -m megatron_fused_ce.launch pretrain_gpt.py ...
    torchrun ... scripts/launch_preloaded.py TURN pretrain_gpt.py ...

`compare_pretrain.py --preload` starts the next launches so, while one trains: their interpreters, torch and
Transformer Engine load (some 10 s) on cores that it leaves idle. Nothing of Megatron is imported and no
GPU is touched before the file TURN exists.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import time

PRELOADED = ("numpy", "torch", "torch._dynamo", "triton", "transformer_engine.pytorch")
POLL_S = 0.05


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[2:] == ["-m"]:
        sys.exit("usage: launch_preloaded.py TURN (-m MODULE | SCRIPT) args...")
    turn, *target = sys.argv[1:]
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while not os.path.exists(turn):
        time.sleep(POLL_S)
    if target[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = target[1:]
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target[0]))
        sys.argv = target
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main()
