"""Run a training script as torchrun would, with one thing about the launch changed.

    torchrun ... scripts/lib/runner.py OPTION Megatron-LM/pretrain_gpt.py ... [--fused-chunked-ce]

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


def _watch_memory(folder: str, step: str, rank: str) -> None:
    """Wraps Megatron's training step: the launch ends after the one that is recorded, on one rank."""
    from megatron_fused_ce.scripts.runs.memory import Recording

    is_mine = int(os.environ.get("RANK", "0")) == int(rank) % int(os.environ.get("WORLD_SIZE", "1"))
    recording = Recording() if is_mine else None  # before Megatron: it sees who builds the model
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    train_step, num_steps = training.train_step, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps != int(step):
            return train_step(*args, **kwargs)
        if recording is not None:
            recording.begin()
        train_step(*args, **kwargs)
        if recording is not None:
            _write(recording, Path(folder), training.get_args())
        torch.distributed.barrier()  # nobody leaves while another rank still writes
        sys.exit(0)

    def marked(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if recording is None or num_steps != int(step):
                return function(*args, **kwargs)
            recording.mark(phase)
            result = function(*args, **kwargs)
            if phase == "backward":
                recording.mark("optimizer")  # unless another micro-batch begins right there
            return result

        return run

    training.train_step = watched
    schedules.forward_step = marked(schedules.forward_step, "forward")
    schedules.backward_step = marked(schedules.backward_step, "backward")


def _write(recording: Recording, folder: Path, args: Any) -> None:
    from megatron_fused_ce.scripts.lib.results import write_whole
    from megatron_fused_ce.scripts.runs import memory

    timeline, snapshot = recording.end("", num_logits(args))
    # The optimizer begins after the last backward alone.
    marks = timeline.marks
    timeline.marks = [mark for mark in marks if mark[1] != "optimizer" or mark is marks[-1]]
    timeline.facts["waits_for_kernels"] = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
    write_whole(folder / SNAPSHOT, pickle.dumps(snapshot))
    memory.write([timeline], folder / TIMELINE, ["memory"])


def num_logits(args: Any) -> int:
    """Elements of a micro-batch's logits on this rank, of Megatron's arguments."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    return int(tokens * (args.padded_vocab_size // args.tensor_model_parallel_size))


# --- the run ---------------------------------------------------------------------------------


def main() -> None:
    option, *words = sys.argv[1:] or [""]
    own, words = words[: OPTIONS.get(option, 0)], words[OPTIONS.get(option, 0) :]
    if option not in OPTIONS or not (words and os.path.isfile(words[0])):
        sys.exit(f"usage: runner.py {' | '.join(OPTIONS)} SCRIPT args..., no {' '.join(words[:1]) or option}")
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    if FLAG in words:
        from megatron_fused_ce.adapter import import_hook

        import_hook.install()
    if option == "--memory":
        _watch_memory(*own)
    else:
        import megatron.training.arguments

        lift_te_refusal(megatron.training.arguments)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
