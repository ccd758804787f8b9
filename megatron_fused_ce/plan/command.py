"""``python -m megatron_fused_ce plan``: whether the flag helps a training, before it is launched."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from megatron_fused_ce.adapter.arguments import add_arguments
from megatron_fused_ce.cli.command_line import Parser, UsageError, command, number, read_text, whole
from megatron_fused_ce.plan import answer, closed_world, launch_script, megatron_arguments, megatron_log
from megatron_fused_ce.plan.answer import GIB, OFF, Gpu, Result, advise
from megatron_fused_ce.plan.closed_world import TrainingLaunch
from megatron_fused_ce.plan.heads import STOCK_PATHS
from megatron_fused_ce.plan.named_models import MODELS, known_name
from megatron_fused_ce.plan.setting import Setting
from megatron_fused_ce.reasons import STOPS

#: Exit status where there is no verdict, as of ``compare``.
NO_VERDICT = 3
#: No machine of today has as much.
MOST_RANKS, MOST_GIB = 10**6, 10**6
MOST_SCRIPT_BYTES, MOST_LOG_BYTES = 2**20, 2**28
#: GiB beside torch's allocator: four launches on H200s that ran out of memory had 1.6, 2.0, 2.0 and 2.8 (what
#: their messages say "the process has in use", less what PyTorch allocated and reserved;
#: 2026-11-21-h200-longest-sequence.json, 2026-11-21-h200-tp4-pretrain-reach.json).
OVERHEAD_GIB = 2.0
#: GiB as torch's out-of-memory messages give them: 139.80 in those files; 79.14 to 79.25 in public reports of
#: A100s and H100s of 80 GB; 178.35 of a B200 (pytorch/ao, pull request 4002). A first part is short for it.
GPUS = {
    "h100-80gb": ("NVIDIA H100 80GB HBM3", 79.14, True),
    "h200-141gb": ("NVIDIA H200", 139.80, True),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 79.14, False),
    "b200-180gb": ("NVIDIA B200", 178.35, False),
}
HELP = """Predict what a training holds on a GPU with each way of computing the loss.

python -m megatron_fused_ce plan --model llama-3-8b --gpus 8 --tp 4 --sequence-parallel --seq-length 32768
python -m megatron_fused_ce plan --from-launch scripts/examples/llama3_8b.sh
python -m megatron_fused_ce plan --from-launch "pretrain_gpt.py --num-layers 32 ..." --gpus 8

Exit status: 0, 2 (the arguments cannot be used; one line says why), 3 (no verdict).
"""


@cache
def _parser(own: bool) -> Parser:
    """The parser of the command line, or only of a launch's arguments."""
    parser = Parser("python -m megatron_fused_ce plan", HELP, add_help=own)
    megatron_arguments.add_megatron_arguments(parser)
    add_arguments(parser)
    if not own:
        return parser
    parser.usage = "%(prog)s [option ...] [argument of pretrain_gpt.py ...]"
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    what.add_argument("--from-log", type=Path, metavar="FILE", help="a log that Megatron wrote")
    what.add_argument(
        "--from-launch",
        metavar="FILE|ARGS",
        help="a launch's shell script (in quotes with its own words), or its arguments in quotes",
    )
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="a variable that the script does not set itself, or by default; repeatable")  # fmt: skip
    add("--gpus", type=whole(most=MOST_RANKS), metavar="N",
        help="of the whole run [the launch's, or the fewest]")  # fmt: skip
    add("--ignore", action="append", default=[], metavar="NAME",
        help="an argument or a program that you vouch for, with dashes or without; repeatable")  # fmt: skip
    short = {name.partition("-")[0]: name for name in GPUS}
    add("--gpu", type=lambda text: short.get(text.lower(), text.lower()), choices=GPUS, metavar="NAME",
        help=f"{', '.join(GPUS)} [{next(iter(GPUS))}]; a log does not say it")  # fmt: skip
    add("--gpu-memory", type=number(above=True, most=MOST_GIB), metavar="GIB",
        help="of one GPU, where it has another size")  # fmt: skip
    add("--overhead", type=number(most=MOST_GIB), default=OVERHEAD_GIB, metavar="GIB",
        help="driver, NCCL and kernels beside torch's allocator [%(default)s]")  # fmt: skip
    add("--explain", action="store_true", help="say why, with every strategy and the sums of every part")
    add("--json", action="store_true", help="print bytes for programs instead of tables")
    return parser


@command("plan")
def main(words: list[str]) -> int:
    """Plan the training that the arguments describe.

    Exit status 2, with one line, if they cannot be used, and 3 where there is no verdict.
    """
    given = _parsed(words)
    try:
        result = plan_of(words)
        if given.json:
            print(json.dumps(answer.as_dictionary(result), indent=1))
        else:
            answer.show(result, given.explain)
        return NO_VERDICT if result.decision == "no verdict" else 0
    except ValueError as error:
        raise UsageError(error) from None


def setting_of(words: Sequence[str]) -> Setting:
    """The setting of :func:`plan_of`."""
    return plan_of(words).setting


def plan_of(words: Sequence[str]) -> Result:
    """The plan for these words of a command line.

    Raises:
        ValueError: something is missing, unknown or contradicts itself; says what to do.
    """
    first, own = _parsed(words), _parser(own=False)
    launch = _launch(first, words, own._actions)
    is_read = bool(first.from_launch or first.from_log)
    before = list(launch.arguments if is_read else megatron_arguments.USUAL)
    stated = launch.logged or closed_world.stated(launch.arguments)
    if first.model:
        first.model = known_name(first.model)
        before += MODELS[first.model].arguments.split()
    # The command line comes last, so that its numbers win.
    known, _ = own.parse_known_args(before)
    as_launched = {name: value for name, value in vars(known).items() if value is not None}
    given = _parsed(words, known)
    given.tokenizer = stated.get("tokenizer_model", "")
    same = all(vars(given)[name] == value for name, value in as_launched.items())
    launch = replace(launch, as_logged=same and given.gpus in (None, launch.gpus))
    ours = {name for action in own._actions for name in (action.dest, *action.option_strings)}
    judged, gpus, alone = closed_world.judge(launch, given, ours), given.gpus or launch.gpus, False
    try:
        setting = megatron_arguments.setting_of(given, gpus, launch.program)
    except ValueError as error:
        if is_read and given.gpus is None and "give --gpus" in str(error):
            judged, gpus = judged._replace(uncounted={"--gpus": str(error)} | judged.uncounted), None
        if not (is_read and judged.uncounted):
            raise
        # Of a model that cannot be planned the head still can.
        setting, alone = megatron_arguments.setting_of(megatron_arguments.head_alone(given), gpus), True
    if judged.no_effect and setting.training.fused_ce.loss_options:
        stops = STOPS.format(setting.training.fused_ce.loss_options, judged.no_effect)
        raise ValueError(f"the launch stops: {stops}")
    notes = list(launch.notes)
    if launch.no_gpus and not (gpus or alone):
        fewest = f"planned for the fewest that the parallel sizes take, {setting.parallel.gpus}"
        notes.insert(0, f"The number of GPUs is not known, {launch.no_gpus}: {fewest}; or give --gpus.")
    impl = given.cross_entropy_fusion_impl if given.cross_entropy_loss_fusion else "unfused"
    advised = partial(advise, gpu=_gpu(given), baseline=impl if impl in STOCK_PATHS else "unfused")
    read = str(first.model or given.from_log or given.from_launch or "--")
    name, flag = "the launch" if _is_launch(read) else Path(read).name, given.fused_chunked_ce
    result = Result(name, setting, advised(setting), notes, judged, launch, alone=alone, has_flag=flag)
    if result.measured and abs(result.planned / result.measured - 1) <= OFF:
        # What was measured leads: every sum is moved by the difference.
        setting = replace(setting, beside=result.measured - result.planned)
        result = replace(result, setting=setting, advice=advised(setting))
    if judged.bounded and not result.measured:
        result = replace(result, most=advised(closed_world.most(setting, judged.bounded)))
    return result


def _gpu(given: argparse.Namespace) -> Gpu:
    name = given.gpu or next(iter(GPUS))
    device, capacity, hopper = GPUS[name]
    capacity = capacity if given.gpu_memory is None else given.gpu_memory
    if not 0 <= given.overhead < capacity:
        raise ValueError(f"--overhead {given.overhead:g} leaves nothing of {capacity:g} GiB")
    return Gpu(name, device, round(capacity * GIB), hopper, round(given.overhead * GIB))


# --- what is planned -------------------------------------------------------------------------


def _parsed(words: Sequence[str], before: argparse.Namespace | None = None) -> argparse.Namespace:
    """The command line, over what a launch says."""
    joined = re.sub(r"(^|\0)--ignore\0", r"\1--ignore=", "\0".join(words)).split("\0") if words else []
    parser = _parser(own=True)
    given, others = parser.parse_known_args(joined, before)
    if others:
        hint = "a launch, with all that it has, goes to --from-launch, by its script or in quotes"
        parser.error(f"{others[0]} is no argument of plan, nor one that it counts: {hint}")
    given.script_words, given.tokenizer = [], ""
    # A script with words of its own, and no wrapper of a command.
    if script := re.fullmatch(
        r"\s*(?:bash |sh )?\s*(\S+\.sh)\s((?!.*(\.py|-m)\b).*)", given.from_launch or ""
    ):
        given.from_launch, given.script_words = script[1], shlex.split(script[2])
    return given


def _is_launch(text: str) -> bool:
    """Whether it is a launch's words and no file's name."""
    return " " in text.strip() or text.startswith("--")


def _launch(
    given: argparse.Namespace, words: Sequence[str], actions: Sequence[argparse.Action]
) -> TrainingLaunch:
    """The launch that a command line names; without one an empty one."""
    file, options = given.from_launch, [action.option_strings for action in actions]
    known = [name for names in options for name in names]
    if wrong := [assignment for assignment in given.set if not re.match(r".+?=", assignment)]:
        raise UsageError(f"--set takes NAME=VALUE, got {wrong[0]!r}")
    if given.from_log and given.gpu is None and given.gpu_memory is None:
        raise UsageError(f"a log does not say the GPU: give --gpu, one of {', '.join(GPUS)}")
    if file and _is_launch(file):
        if given.set:
            raise UsageError("--set is for the variables of a script; arguments in quotes have none")
        return launch_script.of_string(file, known, given.gpus is None)
    if not (file or given.from_log):
        return TrainingLaunch((), None)
    read = Path(file or given.from_log)
    text = read_text(read, MOST_SCRIPT_BYTES if file else MOST_LOG_BYTES, "strict" if file else "replace")
    named = {word.partition("=")[0] for word in words}
    answered = {name for names in options if named & set(names) for name in names}
    values = dict(assignment.split("=", 1) for assignment in given.set)
    try:
        if given.from_log:
            return megatron_log.of_log(text, actions)
        return launch_script.of_script(
            text, values, known, answered, read.parent, given.gpus is None, given.script_words
        )
    except ValueError as error:
        raise ValueError(f"{read}: {error}") from None
