"""gloo groups with one worker thread: see scripts/lib/gloo.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ALONE = """
import atexit, datetime, sys, threading
import torch, torch.distributed as dist
from megatron_fused_ce.scripts.lib import gloo
gloo.use_one_thread()
gloo.use_one_thread()
timeout = datetime.timedelta(seconds=77)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1, timeout=timeout)
for group, seconds in (dist.group.WORLD, 77), (dist.new_group([0], timeout=2 * timeout), 154):
    options = group._get_backend(torch.device("cpu")).options
    assert (options._threads, options._timeout.total_seconds()) == (1, seconds), options
    dist.all_reduce(torch.ones(3), group=group)
atexit.register(print, "at exit")
threading.Thread(target=threading.Event().wait).start()  # would keep Python from ending
gloo.leave()
"""


def test_groups_have_one_worker_thread(tmp_path):
    """All else that a group was asked for is kept; what is to happen at exit does, before the process ends."""
    command = [sys.executable, "-c", ALONE, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "at exit\n"), done.stderr
