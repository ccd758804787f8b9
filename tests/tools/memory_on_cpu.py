"""scripts/lib/runner.py with a CPU's storages for the GPU's allocator, under megatron_cpu."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from megatron_fused_ce.scripts.lib import megatron_cpu, runner  # noqa: E402
from megatron_fused_ce.scripts.runs import memory  # noqa: E402
from tests.support.storage_trace import StorageRecording  # noqa: E402

if __name__ == "__main__":
    memory.Recording = StorageRecording
    megatron_cpu.install()
    runner.main()
