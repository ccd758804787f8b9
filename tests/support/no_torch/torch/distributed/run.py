"""torchrun's part in a launch on one machine: processes with RANK set, logs if asked for, a status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_, standalone, option, number, *words = sys.argv
assert (standalone, option) == ("--standalone", "--nproc-per-node"), sys.argv
# These need torch, the scripts do not.
if words[:2] == ["-m", "megatron_fused_ce.scripts.lib.megatron_cpu"]:
    words = words[2:]
ranks = []
for rank in range(int(number)):
    streams = []
    if "PET_LOG_DIR" in os.environ:
        assert os.environ["PET_REDIRECTS"] == "3"
        folder = Path(os.environ["PET_LOG_DIR"], "run", "attempt_0", str(rank))
        folder.mkdir(parents=True)
        streams = [(folder / f"{name}.log").open("w") for name in ("stdout", "stderr")]
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number}
    out, err = streams or (None, None)
    command = [sys.executable, *words]
    ranks.append(subprocess.Popen(command, env={**os.environ, **place}, stdout=out, stderr=err))
sys.exit(max(abs(rank.wait()) for rank in ranks) and 1)
