"""Run pretrain_gpt.py and print every digit of its losses and gradient norms beside its log.

    torchrun ... scripts/launch_every_digit.py Megatron-LM/pretrain_gpt.py ... [--fused-chunked-ce]

Megatron logs seven digits of a loss and three decimals of a gradient norm: too few to tell runs that are
equal to the bit from runs that nearly are. Nothing else of the launch is changed.
"""

from __future__ import annotations

import os
import sys

from megatron_fused_ce.testing import megatron_cpu


def main() -> None:
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        sys.exit("usage: launch_every_digit.py pretrain_gpt.py args...")
    megatron_cpu.log_every_digit()
    megatron_cpu.run(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
