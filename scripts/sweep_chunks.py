"""How many chunks? `python -m megatron_fused_ce sweep`, under torchrun too; --help says more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from megatron_fused_ce.scripts.lib import gloo
from megatron_fused_ce.scripts.runs.sweep import main

gloo.end(main())
