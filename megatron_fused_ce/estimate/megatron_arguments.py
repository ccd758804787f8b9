"""Megatron's own arguments that decide how many bytes a GPU holds, and the setting from them.

Names, types and defaults are those of Megatron's parser (core_v0.19.0; ``tests/tools/test_plan_command.py``
compares them). Other arguments of a launch are not counted, which :func:`notes` says.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron_fused_ce.adapter.arguments import config_from_args
from megatron_fused_ce.command_line import BILLION, whole
from megatron_fused_ce.command_line import number as share
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.estimate.setting import (
    RECOMPUTE_MODULES,
    SHARDINGS,
    DecoderSizes,
    Latent,
    Mixture,
    Optimizer,
    Parallel,
    Recompute,
    Setting,
    StateSpace,
    StepSettings,
)
from megatron_fused_ce.planner import ITEMSIZES

#: Defaults of a plan by name or numbers: today's usual settings.
USUAL = (
    *("--bf16", "--use-distributed-optimizer", "--no-create-attention-mask-in-dataloader"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
#: Flags whose effect on memory is not modelled, and what is counted instead.
NOT_COUNTED = {
    "--account-for-embedding-in-pipeline-split": "stages are taken as equal",
    "--account-for-loss-in-pipeline-split": "stages are taken as equal",
    "--cpu-offloading-num-layers": "activations are counted on the GPU",
    "--cuda-graph-impl": "a graph keeps a pool of its own (measured: 3 % more)",
    "--distribute-saved-activations": "kept inputs are counted whole",
    "--fp32-residual-connection": "residuals are counted in the training's dtype",
    "--fp4-format": "counted as bf16",
    "--fp4-param-gather": "counted as bf16",
    "--fp8-format": "counted as bf16",
    "--fp8-param-gather": "counted as bf16",
    "--mtp-hybrid-override-pattern": "multi-token prediction is taken as the last layer's kind",
    "--no-position-embedding": "learned positions are counted",
    "--optimizer": "counted as Adam",
    "--optimizer-cpu-offload": "the optimizer is counted on the GPU",
}
#: Values of these that change nothing.
NOTHING = ("None", "False", "0", "none", "[]", "", "adam")
#: Megatron's flags that hold no memory worth counting; all others that are not known here are named.
_NO_MEMORY = re.compile(
    "--(?:no-|disable-|use-)?(?:adam-|adlr-|app-tag|async-|auto-detect|barrier|calculate-per|check-|ckpt-|clip-grad"
    "|config-logger|data-|dataloader|ddp-(?:aver|num|pad)|decoupled|deterministic|dist-ckpt|distributed-(?:back|time)"
    "|enable-(?:exp|ft|msc)|end-weight|eod-mask|error-inj|eval-|exit-|fault-|finetune|flight-|init-method|initial-"
    "|inprocess|legacy|load|local-rank|log-|logging|loss-scale|lr|manual-gc|masked-soft|mcore-models|merge-file|min-l"
    "|mmap|mock-data|moe-(?:aux|grouped|per-layer|permute|router|shared-expert-(?:glu|over)|token-drop|z-loss)"
    "|mtp-loss|non-persistent|norm-epsilon|num-(?:dataset|workers)|nvtx|object-st|one-logger|otel|overlap-|override-"
    "|persist-layer|pretrained|profile|pytorch-prof|record|rerun|reset-|rope-|rotary-(?:base|int|per|sc|seq)|save|seed"
    "|split|straggler|te-rng|tensorboard|test-|tiktoken|timing|tokenizer|train-|trust|use-checkpoint|valid|vocab-file"
    "|wandb|weight-decay|yarn-)"
)
#: Layers and experts are counted one by one, and a size of a parallelism is one of ranks.
_MOST = dict.fromkeys(("num-layers", "num-experts", "mtp-num-layers", "make-vocab-size-divisible-by"), 10**5)
_MOST |= {f"{name}-model-parallel-size": 10**5 for name in ("tensor", "pipeline", "expert")} | {
    "context-parallel-size": 10**5,
    "expert-tensor-parallel-size": 10**5,
    "micro-batch-size": 10**6,
}
_MAY_BE_ZERO = (
    "mtp-num-layers",
    "moe-shared-expert-intermediate-size",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "num-experts",
)
_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
#: What Megatron-FSDP divides; gradients alone (``optim_grads``) are counted whole.
_FSDP_SHARDING = {
    "no_shard": "none",
    "optim": "optimizer",
    "optim_grads": "optimizer",
    "optim_grads_params": "full",
}
MOST_LAYERS = 10**5
_LOCAL_ATTENTION = ("unfused", "local")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the model."""
    group = parser.add_argument_group("the model, by Megatron's arguments")
    number, flag = _adders(group)
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"):
        number(name)
    number("num-query-groups", default=1)
    number("kv-channels")
    number("vocab-size")
    number("make-vocab-size-divisible-by", default=128)
    number("max-position-embeddings")
    for name in ("group-query-attention", "swiglu", "add-qkv-bias", "qk-layernorm"):
        flag(name)
    flag("disable-bias-linear", unset="add_bias_linear")
    flag("untie-embeddings-and-output-weights")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--position-embedding-type", default="learned_absolute")
    flag("use-rotary-position-embeddings")
    number("mtp-num-layers")
    number("num-experts")
    number("moe-ffn-hidden-size")
    number("moe-router-topk", default=2)
    number("moe-shared-expert-intermediate-size")
    group.add_argument("--moe-layer-freq", type=_layer_frequency, default=1)
    flag("multi-latent-attention")
    number("q-lora-rank")
    for name, default in (
        *(("kv-lora-rank", 32), ("qk-head-dim", 128), ("qk-pos-emb-head-dim", 64)),
        *(("v-head-dim", 128), ("mamba-state-dim", 128), ("mamba-head-dim", 64)),
        ("mamba-num-groups", 8),
    ):
        number(name, default=default)
    number("mamba-num-heads")
    group.add_argument("--hybrid-layer-pattern", "--hybrid-override-pattern")
    group.add_argument(
        "--post-norms",
        action="store_true",
        help="not Megatron's: norms behind attention and MLP as well (Gemma 2)",
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Parallelism, precision, batch, recompute, optimizer, loss."""
    group = parser.add_argument_group("the training, by Megatron's arguments")
    number, flag = _adders(group)
    number("tensor-model-parallel-size", "tp", default=1)
    number("pipeline-model-parallel-size", "pp", default=1)
    number("context-parallel-size", "cp", default=1)
    number("expert-model-parallel-size", "ep", default=1)
    number("expert-tensor-parallel-size")
    number("num-layers-per-virtual-pipeline-stage")
    number("num-virtual-stages-per-pipeline-rank")
    number("decoder-first-pipeline-num-layers")
    number("decoder-last-pipeline-num-layers")
    group.add_argument("--pipeline-model-parallel-layout", type=_layout, metavar="Et*2|tL")
    number("micro-batch-size", default=1)
    number("global-batch-size")
    number("seq-length")
    for name in ("sequence-parallel", "bf16", "fp16", "use-distributed-optimizer"):
        flag(name)
    for name in ("grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32"):
        flag(name)
    for name in ("use-precision-aware-optimizer", "use-megatron-fsdp", "use-torch-fsdp2"):
        flag(name)
    group.add_argument(
        "--data-parallel-sharding-strategy", choices=tuple(_FSDP_SHARDING), default="optim_grads_params"
    )
    for name in ("main-params-dtype", "main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"):
        group.add_argument(f"--{name}", choices=tuple(_DTYPE_BYTES), default="fp32")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"))
    number("recompute-num-layers")
    group.add_argument("--recompute-modules", nargs="+")
    flag("recompute-activations")
    group.add_argument("--transformer-impl", default="transformer_engine")
    group.add_argument("--attention-backend", default="auto")
    flag("use-flash-attn")
    group.add_argument("--attention-dropout", type=share(most=1), default=0.1)
    group.add_argument("--hidden-dropout", type=share(most=1), default=0.1)
    flag("no-create-attention-mask-in-dataloader", unset="create_attention_mask_in_dataloader")
    flag("no-gradient-accumulation-fusion", unset="gradient_accumulation_fusion")
    flag("cross-entropy-loss-fusion")
    group.add_argument("--cross-entropy-fusion-impl", choices=("native", "te"), default="native")


def _adders(group: argparse._ArgumentGroup) -> tuple[Any, Any]:
    def number(*names: str, default: int | None = None) -> None:
        bounds = whole(0 if names[0] in _MAY_BE_ZERO else 1, _MOST.get(names[0], BILLION))
        flags = (f"--{name}" for name in names)
        group.add_argument(*flags, type=bounds, metavar="N", default=default)

    def flag(name: str, unset: str = "") -> None:
        """``unset``: the destination that the flag makes false, by Megatron's name."""
        if unset:
            group.add_argument(f"--{name}", action="store_false", dest=unset)
        else:
            group.add_argument(f"--{name}", action="store_true")

    return number, flag


def _layout(text: str) -> tuple[int, ...]:
    """Decoder layers of each part of a layout such as ``Et*3|(tt|)*29,m|L``."""
    parts = text.replace(",", "").replace(" ", "")
    for repeated in (r"\(([^()]*)\)\*(\d{1,4})", r"([Etm])\*(\d{1,4})"):
        parts = re.sub(repeated, lambda match: match[1] * int(match[2]), parts)
    if len(parts) > MOST_LAYERS or not re.fullmatch(r"E[tm|]*L", parts):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no layout such as Et*3|(tt|)*29,m|L")
    return tuple(part.count("t") for part in parts.split("|"))


def _layer_frequency(text: str) -> int | list[int]:
    """An integer, or a list of 0 and 1 with ``*`` and ``+`` as in Python; nothing is executed."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            items = [value(item) for item in node.elts]
            if not all(isinstance(item, int) for item in items):
                raise ValueError
            return items
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return _short_enough(left + right)
            # Checked before the list is made: [1] * 10**9 would take all memory.
            sizes = [len(side) if isinstance(side, list) else side for side in (left, right)]
            if max(sizes) > MOST_LAYERS or sizes[0] * sizes[1] > MOST_LAYERS:
                raise ValueError
            return left * right
        raise ValueError

    try:
        if len(text) > MOST_LAYERS:
            raise ValueError
        found: int | list[int] = _short_enough(value(ast.parse(text, mode="eval").body))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no number and no list of 0 and 1, of at most {MOST_LAYERS}"
        ) from None
    return found


def _short_enough(value: Any) -> Any:
    if (len(value) if isinstance(value, list) else value) > MOST_LAYERS:
        raise ValueError
    return value


def notes(words: Sequence[str], known: Collection[str]) -> list[str]:
    """One sentence for each argument of a launch that is not counted, or has another effect than it seems.

    Args:
        known: names of all arguments that a plan reads.
    """
    named = {}
    for word, behind in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            named[name] = value if equals else "" if behind.startswith("--") else behind
    found = [
        f"{name} is not counted: {what}."
        for name, what in NOT_COUNTED.items()
        if name in named and (named[name] == "" or named[name] not in NOTHING)
    ]
    if "--num-query-groups" in named and "--group-query-attention" not in named:
        found.append("--num-query-groups has no effect: Megatron ignores it without --group-query-attention.")
    if "--use-megatron-fsdp" in named and "--data-parallel-sharding-strategy" not in named:
        found.append(
            "--use-megatron-fsdp is taken with optim_grads_params, Megatron 0.18's default; before: no_shard."
        )
    if re.search(r"m[t,]*\|", named.get("--pipeline-model-parallel-layout", "")):
        found.append("--pipeline-model-parallel-layout: multi-token prediction is counted on the last stage.")
    unknown = [name for name in named if name not in known and name not in NOT_COUNTED]
    unknown = [name for name in unknown if not _NO_MEMORY.match(name)]
    close = {name: difflib.get_close_matches(name, [*known, *NOT_COUNTED], 1, 0.85) for name in unknown}
    found += [
        f"{name} is unknown here and not counted: did you mean {near[0]}?"
        for name, near in close.items()
        if near
    ]
    if others := [name for name, near in close.items() if not near]:
        found.append(f"Unknown here and not counted: {', '.join(others)}.")
    return found


# --- from arguments to a setting -------------------------------------------------------------


def setting_of(given: argparse.Namespace, gpus: int | None = None) -> Setting:
    """The setting that the arguments describe.

    Args:
        gpus: of the whole run; None for the fewest that the parallel sizes take.

    Raises:
        ValueError: something is missing, or two numbers contradict each other; says what to give.
    """
    model = _model(given)
    parallel = _parallel(given, model, gpus)
    training = _training(given, parallel)
    return Setting(model, parallel, training, given.make_vocab_size_divisible_by)


def _needed(given: argparse.Namespace, name: str) -> int:
    value: int | None = getattr(given, name)
    if value is None:
        flag = name.replace("_", "-")
        # No model has a length of its own, and beside a log or a launch none can be named.
        is_read = getattr(given, "from_log", None) or getattr(given, "from_launch", None)
        elsewhere = ", or --model NAME, --from-log FILE or --from-launch FILE"
        named = "" if name == "seq_length" or is_read else elsewhere
        raise ValueError(f"--{flag} is missing: give it{named}")
    return value


def _model(given: argparse.Namespace) -> DecoderSizes:
    hidden, heads = _needed(given, "hidden_size"), _needed(given, "num_attention_heads")
    if given.kv_channels is None and hidden % heads:
        raise ValueError(
            f"--hidden-size {hidden} cannot be divided by --num-attention-heads {heads}: change one of "
            "them, or give --kv-channels"
        )
    pattern, *predicted = (given.hybrid_layer_pattern or "").replace("|", "").split("/")
    if unknown := set(pattern + "".join(predicted)) - set("M*-E"):
        raise ValueError(f"the hybrid pattern has {''.join(sorted(unknown))!r}; known are M * - E")
    gated, embedding = given.swiglu, given.position_embedding_type
    rotary = embedding in ("rope", "yarn", "mrope") or given.use_rotary_position_embeddings
    ffn = given.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    positions = 0
    if embedding == "learned_absolute" and not rotary:
        positions = given.max_position_embeddings or _needed(given, "seq_length")
    layers = len(pattern) or _needed(given, "num_layers")
    return DecoderSizes(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=_needed(given, "vocab_size"),
        ffn_hidden_size=ffn,
        num_query_groups=given.num_query_groups if given.group_query_attention else heads,
        head_dim=given.kv_channels or hidden // heads,
        gated=gated,
        tied=not given.untie_embeddings_and_output_weights,
        rms_norm=given.normalization == "RMSNorm",
        linear_bias=given.add_bias_linear,
        qkv_bias=given.add_qkv_bias,
        qk_norm=given.qk_layernorm,
        post_norms=given.post_norms,
        learned_positions=0 if pattern else positions,
        rotary=rotary,
        mtp_num_layers=len(predicted) or given.mtp_num_layers or 0,
        pattern=pattern,
        prediction_pattern=predicted[0] if predicted else "",
        latent=_latent(given),
        mixture=_mixture(given, layers, ffn),
        state_space=_state_space(given, hidden) if "M" in pattern else None,
    )


def _latent(given: argparse.Namespace) -> Latent | None:
    if not given.multi_latent_attention:
        return None
    return Latent(
        given.q_lora_rank,
        given.kv_lora_rank,
        given.qk_head_dim,
        given.qk_pos_emb_head_dim,
        given.v_head_dim,
    )


def _mixture(given: argparse.Namespace, num_layers: int, ffn: int) -> Mixture | None:
    if not given.num_experts:
        return None
    every = given.moe_layer_freq
    if isinstance(every, int):
        every = [int(index % max(1, every) == 0) for index in range(num_layers)]
    return Mixture(
        given.num_experts,
        given.moe_router_topk,
        given.moe_ffn_hidden_size or ffn,
        given.moe_shared_expert_intermediate_size or 0,
        tuple(map(bool, every)),
    )


def _state_space(given: argparse.Namespace, hidden: int) -> StateSpace:
    head_dim = given.mamba_head_dim
    heads = given.mamba_num_heads or 2 * hidden // head_dim
    return StateSpace(heads, head_dim, given.mamba_state_dim, given.mamba_num_groups)


def _parallel(given: argparse.Namespace, model: DecoderSizes, gpus: int | None) -> Parallel:
    tensor, pipeline = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    context, expert = given.context_parallel_size, given.expert_model_parallel_size
    # Megatron prints a size for models without experts as well.
    expert_tensor = (given.expert_tensor_parallel_size or tensor) if model.mixture else 1
    chunks = given.num_virtual_stages_per_pipeline_rank or 1
    if of_a_chunk := given.num_layers_per_virtual_pipeline_stage:
        if model.num_layers % (pipeline * of_a_chunk):
            raise ValueError(
                f"{model.num_layers} layers cannot be divided into {pipeline} stages with chunks of "
                f"{of_a_chunk}"
            )
        chunks = model.num_layers // pipeline // of_a_chunk
    if layout := given.pipeline_model_parallel_layout or ():
        chunks = max(1, len(layout) // pipeline)
    return Parallel(
        gpus=gpus or tensor * pipeline * max(context, -(-expert * expert_tensor // tensor)),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence=given.sequence_parallel and tensor > 1,
        chunks=chunks,
        first_stage_layers=given.decoder_first_pipeline_num_layers,
        last_stage_layers=given.decoder_last_pipeline_num_layers,
        layout=layout,
    )


def _training(given: argparse.Namespace, parallel: Parallel) -> StepSettings:
    if given.bf16 and given.fp16:
        raise ValueError("both --bf16 and --fp16 are given: leave out one")
    dtype = "bfloat16" if given.bf16 else "float16" if given.fp16 else "float32"
    engine = given.transformer_impl == "transformer_engine"
    flash = (engine or given.use_flash_attn) and given.attention_backend not in _LOCAL_ATTENTION
    return StepSettings(
        sequence=_needed(given, "seq_length"),
        micro_batch=given.micro_batch_size,
        num_micro_batches=_micro_batches(given, parallel),
        dtype=dtype,
        recompute=_recompute(given),
        optimizer=_optimizer(given, dtype),
        transformer_engine=engine,
        flash_attention=flash,
        attention_dropout=given.attention_dropout > 0,
        hidden_dropout=given.hidden_dropout > 0,
        attention_mask=given.create_attention_mask_in_dataloader,
        gradient_fusion=given.gradient_accumulation_fusion,
        fused_ce=_fused_ce(given),
    )


def _micro_batches(given: argparse.Namespace, parallel: Parallel) -> int | None:
    batch, at_once = given.global_batch_size, given.micro_batch_size * parallel.data
    if batch is None:
        return None
    if batch % at_once:
        raise ValueError(
            f"--global-batch-size {batch} cannot be divided into micro-batches of "
            f"{given.micro_batch_size} on {parallel.data} data-parallel ranks: give a multiple of {at_once}"
        )
    return int(batch // at_once)


def _recompute(given: argparse.Namespace) -> Recompute:
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    if granularity is None:
        return Recompute()
    if granularity == "full":
        return Recompute(
            full=True,
            num_layers=given.recompute_num_layers,
            block=given.recompute_method == "block",
        )
    modules = tuple(given.recompute_modules or ("core_attn",))
    if unknown := [name for name in modules if name not in RECOMPUTE_MODULES]:
        raise ValueError(
            f"--recompute-modules {' '.join(unknown)} is not known here; there are "
            f"{', '.join(RECOMPUTE_MODULES)}"
        )
    return Recompute(modules=modules)


def _optimizer(given: argparse.Namespace, dtype: str) -> Optimizer:
    sharding = given.sharding or _sharding(given)
    assert sharding in SHARDINGS
    low = dtype != "float32"
    gradient = 2 if low and _low_gradients(given, dtype, sharding) else 4
    state = 12 if low else 8
    if given.use_precision_aware_optimizer:
        names = (given.main_params_dtype, given.exp_avg_dtype, given.exp_avg_sq_dtype)
        state = sum(_DTYPE_BYTES[name] for name in names)
    if given.bytes_per_parameter is not None:
        state = given.bytes_per_parameter - gradient - ITEMSIZES[dtype]
        if state < 0:
            raise ValueError(
                f"--bytes-per-parameter {given.bytes_per_parameter:g} is less than weight and gradient, "
                f"{ITEMSIZES[dtype]} + {gradient}"
            )
    copies = 4 if given.adam == "foreach" else 0
    if gradient == 2 and sharding != "full" and not given.use_precision_aware_optimizer:
        copies += 4  # Megatron steps with fp32 gradients
    return Optimizer(sharding, gradient, state, copies)


def _sharding(given: argparse.Namespace) -> str:
    if given.use_torch_fsdp2:
        return "full"
    if given.use_megatron_fsdp:
        return _FSDP_SHARDING[given.data_parallel_sharding_strategy]
    return "optimizer" if given.use_distributed_optimizer else "none"


def _low_gradients(given: argparse.Namespace, dtype: str, sharding: str) -> bool:
    """Whether gradients are kept in 2 bytes."""
    if sharding == "full" or given.grad_reduce_in_bf16:
        return True
    if given.use_precision_aware_optimizer and given.main_grads_dtype != "fp32":
        return True
    return dtype == "float16" and not given.accumulate_allreduce_grads_in_fp32


def _fused_ce(given: argparse.Namespace) -> FusedCEConfig:
    """The plugin's flags, as a launch would read them; the vocabulary's size is the model's."""
    masks = given.fused_ce_mask_padded_vocab
    asked = {**vars(given), "fused_chunked_ce": True, "fused_ce_mask_padded_vocab": False}
    config = config_from_args(argparse.Namespace(**asked))
    assert config is not None
    return replace(config, true_vocab_size=given.vocab_size) if masks else config
