"""Run pretrain_gpt.py without ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron-LM asks for on Hopper.

    torchrun ... scripts/launch_many_connections.py Megatron-LM/pretrain_gpt.py ... [--fused-chunked-ce]

With tensor parallelism its check of the arguments refuses to start otherwise. Here that one check sees the
variable; CUDA, NCCL and all that runs afterwards do not. For measuring, and for what newer GPUs run like.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
PLUGIN_FLAG = "--fused-chunked-ce"


def lift_refusal(arguments: Any) -> None:
    """Wrap ``validate_args`` of the module ``megatron.training.arguments``."""
    check = arguments.validate_args

    def validate_args(*args: Any, **named: Any) -> Any:
        os.environ[VARIABLE] = "1"
        try:
            return check(*args, **named)
        finally:
            del os.environ[VARIABLE]

    arguments.validate_args = validate_args


def main() -> None:
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        sys.exit("usage: launch_many_connections.py pretrain_gpt.py args...")
    os.environ.pop(VARIABLE, None)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if PLUGIN_FLAG in sys.argv:
        from megatron_fused_ce.adapter import import_hook

        import_hook.install()
    import megatron.training.arguments

    lift_refusal(megatron.training.arguments)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
