"""Run a training script as torchrun would, with one thing about the launch changed.

    torchrun ... scripts/lib/runner.py OPTION... Megatron-LM/pretrain_gpt.py ... [--fused-chunked-ce]

    --te-loss           Transformer Engine's cross entropy, which Megatron's check of its arguments refuses
                        from 0.18 on ("disabled due to stability issues") while the model still has it
    --memory FOLDER STEP RANK
                        record the memory of one step on one rank (-1: the last), and end after it

The first lifts one refusal: the check sees what it asks for, all that runs afterwards does not. It is for
measuring beside, not for training. The plugin's hook is installed where its flag is given.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fused_ce.scripts.runs.memory import Recording

FLAG = "--fused-chunked-ce"
#: Number of values of each option.
OPTIONS = {"--te-loss": 0, "--memory": 3}
#: What --memory leaves in its folder; the snapshot is for torch's viewer.
TIMELINE, SNAPSHOT = "memory.json", "snapshot.pickle"


# --- the refusal that is lifted ----------------------------------------------------------------


def lift_te_refusal(arguments: Any) -> None:
    """Wrap ``validate_args`` of the module ``megatron.training.arguments``: it sees ``native``."""
    check = arguments.validate_args

    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        asked = args.cross_entropy_fusion_impl
        args.cross_entropy_fusion_impl = "native"
        checked = check(args, *rest, **named)
        args.cross_entropy_fusion_impl = asked
        return checked

    arguments.validate_args = validate_args


# --- the memory of one step ------------------------------------------------------------------


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
        from megatron_fused_ce.scripts.lib.results import write_whole
        from megatron_fused_ce.scripts.runs import memory

        timeline, snapshot = recording.end("", num_logits(self._get_args()))
        timeline.marks = in_phases(timeline.marks)
        timeline.facts["waits_for_kernels"] = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        write_whole(self._folder / SNAPSHOT, pickle.dumps(snapshot))
        memory.write([timeline], self._folder / TIMELINE, ["memory"])


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


def _watch_memory(folder: str, step: str, wanted: str) -> None:
    from megatron_fused_ce.scripts.runs.memory import Recording

    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mine = int(os.environ.get("RANK", "0")) == int(wanted) % num_ranks
    recording = Recording() if mine else None  # before Megatron: it sees who builds the model
    import megatron.core.pipeline_parallel.schedules
    import megatron.training.training

    watch = StepWatch(recording, int(step), Path(folder))
    watch.install(megatron.training.training, megatron.core.pipeline_parallel.schedules)


# --- the run ---------------------------------------------------------------------------------


def parse(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(option -> its values, the script and its arguments)."""
    own: dict[str, list[str]] = {}
    while words and words[0] in OPTIONS:
        end = 1 + OPTIONS[words[0]]
        own[words[0]], words = words[1:end], words[end:]
    if not (words and os.path.isfile(words[0])):
        sys.exit(f"usage: runner.py OPTION... SCRIPT args..., no {' '.join(words[:1])}")
    return own, words


def main() -> None:
    own, words = parse(sys.argv[1:])
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    if FLAG in words:
        from megatron_fused_ce.adapter import import_hook

        import_hook.install()
    if "--memory" in own:
        _watch_memory(*own["--memory"])
    if "--te-loss" in own:
        import megatron.training.arguments

        lift_te_refusal(megatron.training.arguments)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
