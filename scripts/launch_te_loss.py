"""Run pretrain_gpt.py with ``--cross-entropy-fusion-impl te`` where Megatron-LM refuses it.

    torchrun ... scripts/launch_te_loss.py Megatron-LM/pretrain_gpt.py ... \\
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl te

From 0.18 on, Megatron's check of its arguments refuses Transformer Engine's cross entropy ("disabled
due to stability issues") while the model still has it. Here that one check sees ``native``; all that
runs afterwards sees ``te``. For measuring beside it, not for training.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def lift_refusal(arguments: Any) -> None:
    """Wrap ``validate_args`` of the module ``megatron.training.arguments``."""
    check = arguments.validate_args

    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        asked = args.cross_entropy_fusion_impl
        args.cross_entropy_fusion_impl = "native"
        checked = check(args, *rest, **named)
        args.cross_entropy_fusion_impl = asked
        return checked

    arguments.validate_args = validate_args


def main() -> None:
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        sys.exit("usage: launch_te_loss.py pretrain_gpt.py args...")
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    import megatron.training.arguments

    lift_refusal(megatron.training.arguments)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
