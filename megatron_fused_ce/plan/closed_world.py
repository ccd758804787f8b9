"""The closed world: every argument of Megatron's parsers, and what a plan knows of its effect on memory.

``arguments.tsv`` has one line for each (written by scripts/dev/megatron_arguments.py from checkouts of 0.15
to main, classes by hand). An argument with another value than its default, of any of these versions, is

=================  ==================================================================================
class              meaning
=================  ==================================================================================
``counted``        a plan counts it; with values behind it, these alone
``none``           no effect on a GPU's peak: where Megatron reads it, or what it belongs to
``where A or B``   no effect where one of these holds (:data:`CONDITIONS`)
``as NAME``        no effect where it is as large as another argument, as Megatron sets it
``bounded``        the verdict has to hold with the most that it may add as well (:func:`most`); ``bounded
                   moments``: of a resumed run without experts and without the distributed optimizer
``derived``        only a log has it; it follows from others
``log``            sizes come from elsewhere, and a log has them
``-``              may change memory: no verdict, unless ``--ignore`` vouches for it
=================  ==================================================================================

and any argument that is none of Megatron's is as the last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fused_ce.plan.setting import LETTERS, RECOMPUTE_MODULES, Setting
from megatron_fused_ce.reasons import BY_ARGUMENT


def flash_attention(given: Any) -> bool:
    """Whether attention keeps no scores."""
    engine = given.transformer_impl == "transformer_engine"
    return (engine or given.use_flash_attn) and given.attention_backend not in ("unfused", "local")


FILE = Path(__file__).with_name("arguments.tsv")
#: Programs that train what a plan counts.
PROGRAMS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py")
#: Facts of a launch (:mod:`.megatron_arguments`' values), by the words of the file.
CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "engine": lambda given: given.transformer_impl == "transformer_engine",
    "flash": flash_attention,
    # Megatron's own attention takes its kernel (core/fusions/fused_softmax.py), softmax in fp32.
    "fused softmax": lambda given: (
        given.transformer_impl == "local"
        and (given.bf16 or given.fp16)
        and 16 < given.seq_length <= 16384
        and given.seq_length % 4 == 0
        and given.num_attention_heads // given.tensor_model_parallel_size * given.micro_batch_size % 4 == 0
    ),
    "gated": lambda given: given.swiglu,
    "not gated": lambda given: not given.swiglu,
    "no bias": lambda given: not given.add_bias_linear,
    "no dropout": lambda given: not given.hidden_dropout,
    "no rotary": lambda given: given.position_embedding_type in ("learned_absolute", "none"),
    "no context parallelism": lambda given: given.context_parallel_size == 1,
    "one stage": lambda given: given.pipeline_model_parallel_size == 1,
    "no virtual stages": lambda given: (
        (given.num_layers_per_virtual_pipeline_stage or given.num_virtual_stages_per_pipeline_rank) is None
    ),
}
#: What is said of an argument.
UNKNOWN = " may change memory and is not counted"
#: What of it the user can mend, and need not vouch for.
MENDS = re.compile("did you mean|give --gpus")
#: Transformer Engine's flash attention serves heads up to it on every GPU.
LARGEST_FLASH_HEAD = 256
#: Tokens that a rank's experts may be sent, over what an even spread would send.
MOST_LOAD = 2
#: Bytes a parameter that a resumed run may keep of the moments that it loaded.
LOADED_BYTES = 8
#: The bits of NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN that a backend sets; Megatron stops
#: where the environment has another (core/models/common/language_module/language_module.py).
_BITS = {"local": "000", "flash": "100", "fused": "010", "unfused": "001", "auto": "111"}
_BIT_NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
#: Other variables of Transformer Engine that change no tensor: which algorithms, on how many SMs.
_HARMLESS = re.compile("NVTE_(ALLOW_NONDETERMINISTIC_ALGO|(FWD|BWD)_LAYERNORM_SM_MARGIN|DEBUG.*)")


@dataclass(frozen=True)
class TrainingLaunch:
    """One training's arguments."""

    arguments: tuple[str, ...]
    gpus: int | None  # processes over all nodes; None if the launcher's arguments do not say
    no_gpus: str = ""  # why they do not, a clause
    program: str = ""  # the Python file that is started, or -m and a module; empty where none is named
    notes: tuple[str, ...] = ()  # sentences about what was read
    #: of a log: the largest peak that Megatron says it measured, whether the run died of memory, whether the
    #: plan is of that run without a change, and every argument as printed, by its destination
    measured_bytes: int | None = None
    out_of_memory: bool = False
    as_logged: bool = True
    logged: Mapping[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # variables set beside, of which some matter
    doubts: Mapping[str, str] = field(
        default_factory=dict
    )  # what could not be read, by a name, with a clause


class Argument(NamedTuple):
    """One line of the file."""

    option: str  # the first of its options, or its name
    #: kinds of action: T and F set true and false, B either, v takes a value, * several
    options: Mapping[str, str]
    defaults: tuple[str, ...]  # of each version; "." where it has no such argument
    which: str
    why: str


class Judged(NamedTuple):
    """What of a launch a plan does not count, by name, with a clause that says why; first what to mend."""

    uncounted: dict[str, str]
    bounded: dict[str, str]
    vouched: tuple[str, ...]  # what the user vouched for
    no_effect: str  # why the head stays on Megatron's own path


@cache
def versions() -> tuple[str, ...]:
    """Of Megatron, oldest first: 0.15 to main's."""
    return tuple(FILE.read_text().partition(":")[0].removeprefix("# ").split())


@cache
def arguments() -> dict[str, Argument]:
    """By Megatron's destinations."""
    found = {}
    for line in FILE.read_text().splitlines()[1:]:
        name, called, defaults, which, why = (*line.split("\t"), "", "")[:5]
        options: dict[str, str] = {}
        for kind, *flags in (group.split(" ") for group in called.split("|") if group):
            options |= dict.fromkeys(flags or [f"--{name.replace('_', '-')}"], kind)
        each: list[str] = []
        for default in defaults.split(";"):
            each.append(each[-1] if default == '"' else default)
        each += [each[-1]] * (len(versions()) - len(each))
        found[name] = Argument(next(iter(options), name), options, tuple(each), which, why)
    return found


@cache
def _by_option() -> dict[str, str]:
    return {option: name for name, argument in arguments().items() for option in argument.options}


def _plain(value: str) -> str:
    """A value without what differs between a command line, a parser and a log."""
    words = re.sub(r"[\[\](),'\"]", " ", value).split()
    plain = [re.sub(r"^(torch|[A-Z]\w+)\.(?=[a-z])", "", word).lower() for word in words]
    try:
        return " ".join(str(float(word)) for word in plain)
    except ValueError:
        return " ".join(plain)


def stated(words: Sequence[str]) -> dict[str, str]:
    """What a command line states: values by destination, or by the option where it is none of Megatron's.

    Raises:
        ValueError: an argument of effect has a place that its author left open, such as <SIZE>.
    """
    found = {}
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for place, end in zip(starts, [*starts[1:], len(words)], strict=False):
        option, equals, value = words[place].partition("=")
        name = _by_option().get(option, option)
        argument = arguments().get(name)
        kind = argument.options.get(option, "*") if argument else "*"
        if not equals:
            value = " ".join(words[place + 1 : place + 2 if kind == "v" and place + 1 < end else end])
        if kind in ("T", "F", "B"):
            value = str(kind == "T" or (kind == "B" and not option.startswith("--no-")))
        matters = argument and argument.which.split()[0] in ("counted", "where", "as")
        if matters and re.fullmatch(r"<[^<>]*>", value):
            raise ValueError(f"{option} is {value}, a place to fill: give {option}")
        found[name] = value
    return found


def judge(launch: TrainingLaunch, given: Any, known: Collection[str]) -> Judged:
    """What of a launch is not counted and not vouched for.

    Args:
        given: its arguments as a plan reads them.
        known: options and destinations of the plan's and the plugin's own.

    Raises:
        ValueError: ``--ignore`` names something else.
    """
    values = stated(launch.arguments) if launch.logged is None else launch.logged
    program = launch.program.rpartition("/")[2]
    uncounted: dict[str, str] = {}
    bounded: dict[str, str] = {}
    for name, value in values.items():
        argument = arguments().get(name)
        if argument is None:
            near = difflib.get_close_matches(name, [*_by_option(), *known], 1, 0.85)
            hint = f" (did you mean {near[0]}?)" if near and name.startswith("--") else ""
            if name not in known:
                uncounted[name] = f"{name} is none of Megatron's arguments{hint}"
            continue
        option, plain = argument.option, _plain(value)
        which, _, rest = argument.which.partition(" ")
        if any(plain == _plain(default) for default in argument.defaults if default != "."):
            continue
        if which == "counted" and rest and not any(map(plain.startswith, rest.lower().split())):
            words = f"{option} {value}" if "v" in argument.options.values() else option
            uncounted[option] = f"{words} is not counted"
        elif which == "bounded" and rest and given.num_experts:
            uncounted[option] = f"{option}: resumed experts hold more than is counted"
        elif which == "bounded" and not (rest and given.use_distributed_optimizer):
            bounded[option] = argument.why
        elif (
            which == "-"
            or (which == "log" and launch.logged is None)
            or (which == "where" and not any(CONDITIONS[one](given) for one in rest.split(" or ")))
            or (which == "as" and plain not in ("none", _plain(str(getattr(given, rest)))))
        ):
            uncounted[option] = option + UNKNOWN
    if given.num_experts:
        bounded["experts"] = f"the verdict holds for up to {MOST_LOAD} times an even spread of tokens"
    uncounted |= _values_beyond(given, program) | dict(launch.doubts)
    bits = dict(zip(_BIT_NAMES, _BITS.get(given.attention_backend, "???"), strict=True))
    for name, value in launch.environment.items():
        if name.startswith("NVTE_") and not _HARMLESS.fullmatch(name) and value != bits.get(name):
            uncounted[name] = f"{name}={value} in the environment is not counted"
    uncounted = dict(sorted(uncounted.items(), key=lambda item: not MENDS.search(item[1])))
    if program and program not in PROGRAMS:
        uncounted = {program.removeprefix("-m "): f"what {program} trains is not known"} | uncounted
    vouched = {_bare(name): name for name in given.ignore}
    if unknown := vouched.keys() - set(map(_bare, uncounted)):
        names = ", ".join(uncounted) or "all of it is"
        wrong = next(name for plain, name in vouched.items() if plain in unknown)
        raise ValueError(f"--ignore {wrong} vouches for nothing here; not counted: {names}")
    left = {name: why for name, why in uncounted.items() if _bare(name) not in vouched}
    taken = tuple(name for name in uncounted if name not in left)
    return Judged(left, bounded, taken, _why_no_effect(values, given, is_hybrid(given, program)))


def _bare(name: str) -> str:
    return name.strip("-").replace("-", "_")


def is_hybrid(given: Any, program: str) -> bool:
    """Whether it trains a hybrid model: by program, pattern or spec."""
    return bool(given.hybrid_layer_pattern or re.search("mamba|hybrid", f"{program} {given.spec}"))


def _values_beyond(given: Any, program: str) -> dict[str, str]:
    """Counted arguments with values that a plan does not count, and a clause that says why."""
    letters = set(given.hybrid_layer_pattern or "") - set(LETTERS) - set("|/")
    modules = set(given.recompute_modules or ()) - set(RECOMPUTE_MODULES)
    width = given.kv_channels or (given.hidden_size or 0) // (given.num_attention_heads or 1)
    flash, half = flash_attention(given), given.bf16 or given.fp16
    linear = given.cross_entropy_fusion_impl == "linear" and given.cross_entropy_loss_fusion
    early = re.search(r"m.*\|", given.pipeline_model_parallel_layout or "")
    hybrid = program == "pretrain_gpt.py" and is_hybrid(given, "")
    found = {
        "--hybrid-layer-pattern": (letters and f"layers of kind {' '.join(sorted(letters))} are not counted")
        or (hybrid and "a hybrid by pretrain_gpt.py is not counted"),
        "--recompute-modules": modules and f"recomputing {' '.join(sorted(modules))} is not counted",
        "--bf16": flash
        and not half
        and "attention in fp32, which flash attention does not serve, is not counted",
        "--kv-channels": flash
        and width > LARGEST_FLASH_HEAD
        and f"heads of {width}, which flash attention may not serve, are not counted",
        "--cross-entropy-fusion-impl": linear
        and not given.fused_chunked_ce
        and "linear, a loss of Megatron's dev branch, which the flag replaces, is not counted",
        "--pipeline-model-parallel-layout": early and "prediction before the last stage is not counted",
    }
    return {name: str(clause) for name, clause in found.items() if clause}


def _why_no_effect(values: Mapping[str, str], given: Any, hybrid: bool) -> str:
    """The reason of an argument that keeps the head on Megatron's own path; empty if none does."""
    stated = {name: _plain(values.get(name, "")) for name in BY_ARGUMENT}
    stated = {name: value for name, value in stated.items() if value not in ("", "none", "false", "0.0")}
    shards, dtype = stated.get("tensor_parallel_num_weight_shards"), stated.get("logit_dtype")
    ours = ("bf16", "bfloat16") if given.bf16 else ("fp16", "float16") if given.fp16 else ()
    #: of those with a condition, whether the head is fused all the same
    spared = {
        "tensor_parallel_num_weight_shards": shards == str(float(given.tensor_model_parallel_size)),
        "fp8_output_proj": hybrid,
        "logit_dtype": dtype in ("fp32", "float32", *ours),
        # ModelOpt's set-up may join the heads of student and teacher.
        **dict.fromkeys(("modelopt_enabled", "export_kd_teacher_load"), "export_kd_teacher_load" in stated),
    }
    return next((BY_ARGUMENT[name].format(dtype) for name in stated if not spared.get(name)), "")


def most(setting: Setting, bounded: Collection[str]) -> Setting:
    """``setting`` with the most that its bounded arguments may add."""
    model, training = setting.model, setting.training
    if model.mixture and "experts" in bounded:
        model = replace(model, mixture=replace(model.mixture, load=MOST_LOAD))
    if "--load" in bounded or "--pretrained-checkpoint" in bounded:
        training = replace(training, state_bytes=training.state_bytes + LOADED_BYTES)
    mask = training.micro_batch * training.sequence**2 * ("--reset-attention-mask" in bounded)
    return replace(setting, model=model, training=training, beside=setting.beside + mask)
