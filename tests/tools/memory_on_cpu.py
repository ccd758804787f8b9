"""scripts/launch_memory_profile.py with a CPU's storages for the GPU's allocator, under megatron_cpu."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

import launch_memory_profile  # noqa: E402

from tests.support.storage_trace import StorageRecording  # noqa: E402

if __name__ == "__main__":
    launch_memory_profile.Recording = StorageRecording
    launch_memory_profile.main()
