"""torchrun's part in a launch on one machine: processes with RANK set, a log folder each, a status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_, standalone, option, number, *words = sys.argv
assert (standalone, option) == ("--standalone", "--nproc-per-node"), sys.argv
assert os.environ["PET_REDIRECTS"] == "3"
if words[:2] == [
    "-m",
    "megatron_fused_ce.testing.megatron_cpu",
]:  # it needs torch, the scripts do not
    words = [word for word in words[2:] if word != "--fused-wgrad"]
ranks = []
for rank in range(int(number)):
    folder = Path(os.environ["PET_LOG_DIR"], "run", "attempt_0", str(rank))
    folder.mkdir(parents=True)
    with open(folder / "stdout.log", "w") as out, open(folder / "stderr.log", "w") as err:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number}
        ranks.append(
            subprocess.Popen([sys.executable, *words], env={**os.environ, **place}, stdout=out, stderr=err)
        )
sys.exit(max(abs(rank.wait()) for rank in ranks) and 1)
