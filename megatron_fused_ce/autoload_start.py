"""Imported at every start of Python, from the copy that ``autoload install`` puts beside its .pth file.

Without effect unless a flag of this package is on the command line. The package may be uninstalled by then.
"""

from __future__ import annotations

import os
import sys

#: As :mod:`.adapter.arguments` has them.
FLAGS = ("--fused-chunked-ce", "--fused-ce-")

# A program that embeds Python may have no sys.argv.
if any(word.startswith(FLAGS) for word in getattr(sys, "argv", ())):
    try:
        from megatron_fused_ce.adapter.import_hook import install
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron_fused_ce"):
            raise
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # under torchrun the launcher has already said so
            print(
                f"megatron_fused_ce is not installed any more, so {FLAGS[0]} is unknown: install it again, "
                f"or delete {os.path.splitext(__file__)[0]}.pth",
                file=sys.stderr,
            )
    else:
        install()
