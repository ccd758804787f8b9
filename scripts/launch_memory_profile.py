"""Run a training script as torchrun would, record the memory of one of its steps, and end after it.

    torchrun ... scripts/launch_memory_profile.py FOLDER STEP RANK pretrain_gpt.py ... [--fused-chunked-ce]

`memory_profile.py` launches it. The rank RANK (-1: the last, which has the head) leaves in FOLDER
memory.json and snapshot.pickle; the latter is for torch's viewer (https://pytorch.org/memory_viz).
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atomic import write_whole
from memory_snapshots import Recording, to_json

PLUGIN_FLAG = "--fused-chunked-ce"
TIMELINE, SNAPSHOT = "memory.json", "snapshot.pickle"


class StepWatch:
    """Wraps Megatron's training step; ``recording`` None: another rank records."""

    def __init__(self, recording: Recording | None, step: int, folder: Path) -> None:
        self._recording = recording
        self._step = step
        self._folder = folder
        self._num_steps = 0

    def install(self, training: Any, schedules: Any) -> None:
        """Into ``megatron.training.training`` and ``megatron.core.pipeline_parallel.schedules``."""
        self._get_args = training.get_args
        training.train_step = self._watched(training.train_step)
        for phase in ("forward", "backward"):
            name = f"{phase}_step"
            setattr(schedules, name, self._marked(getattr(schedules, name), phase))

    def _watched(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._num_steps += 1
            last = self._num_steps == self._step
            if last and self._recording is not None:
                self._recording.begin()
            result = train_step(*args, **kwargs)
            if last:
                if self._recording is not None:
                    self._write(self._recording)
                _leave_together()
            return result

        return watched

    def _marked(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            recording = self._recording if self._num_steps == self._step else None
            if recording is not None:
                recording.mark(phase)
            result = function(*args, **kwargs)
            if recording is not None and phase == "backward":
                recording.mark("optimizer")  # unless another micro-batch begins right there
            return result

        return marked

    def _write(self, recording: Recording) -> None:
        timeline, snapshot = recording.end("", num_logits(self._get_args()))
        timeline.marks = in_phases(timeline.marks)
        timeline.facts["waits_for_kernels"] = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        write_whole(self._folder / SNAPSHOT, pickle.dumps(snapshot))
        write_whole(self._folder / TIMELINE, to_json([timeline]).encode())


def num_logits(args: Any) -> int:
    """Elements of a micro-batch's logits on this rank, of Megatron's arguments."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    return int(tokens * (args.padded_vocab_size // args.tensor_model_parallel_size))


def in_phases(marks: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Without what a later mark takes back: the optimizer begins after the last backward alone."""
    return [mark for i, mark in enumerate(marks) if mark[1] != "optimizer" or i == len(marks) - 1]


def _leave_together() -> None:
    """End the launch; nobody leaves while another rank still writes."""
    import torch

    torch.distributed.barrier()
    sys.exit(0)


def main() -> None:
    if len(sys.argv) < 5 or not os.path.isfile(sys.argv[4]):
        sys.exit("usage: launch_memory_profile.py FOLDER STEP RANK pretrain_gpt.py args...")
    folder, step, wanted, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mine = int(os.environ.get("RANK", "0")) == int(wanted) % num_ranks
    recording = Recording() if mine else None
    if PLUGIN_FLAG in arguments:
        from megatron_fused_ce.adapter import import_hook

        import_hook.install()
    import megatron.core.pipeline_parallel.schedules
    import megatron.training.training

    watch = StepWatch(recording, int(step), Path(folder))
    watch.install(megatron.training.training, megatron.core.pipeline_parallel.schedules)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
