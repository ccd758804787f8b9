"""Megatron's own arguments that decide how many bytes a GPU holds, and the setting from them.

Names, types and defaults are those of Megatron's parser (core_v0.19.0; ``tests/plan/test_command.py``
compares them). What other arguments do is in ``arguments.tsv`` (:mod:`closed_world`).
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import replace
from typing import Any

from megatron_fused_ce.adapter.arguments import config_from_args
from megatron_fused_ce.command_line import BILLION, whole
from megatron_fused_ce.command_line import number as share
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.plan.setting import (
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
#: Tokens of the busiest rank's experts over an even spread: no router spreads them evenly in every step (the
#: records of tests/plan/megatron_records.tsv lie at 1.0 to 1.3).
BUSIEST = 1.1
_LOCAL_ATTENTION = ("unfused", "local")
#: Layers of a hybrid model that are counted: Mamba, attention, MLP, experts.
_LETTERS = "M*-E"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the model."""
    group = parser.add_argument_group("the model, by Megatron's arguments")
    number, flag = _adders(group)
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"):
        number(name)
    number("num-query-groups", default=1)
    number("kv-channels")
    number("vocab-size")
    number("padded-vocab-size")
    number("make-vocab-size-divisible-by", default=128)
    number("max-position-embeddings")
    for name in ("group-query-attention", "swiglu", "quick-geglu", "add-qkv-bias", "qk-layernorm"):
        flag(name)
    flag("no-position-embedding", unset="add_position_embedding")
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
    for name in ("hybrid-attention-ratio", "hybrid-mlp-ratio"):
        group.add_argument(f"--{name}", type=share(most=1), default=0.0)
    group.add_argument("--spec", nargs="*")
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
    group.add_argument("--pipeline-model-parallel-layout", metavar="Et*2|tL")
    number("micro-batch-size", default=1)
    number("global-batch-size")
    number("seq-length")
    for name in ("sequence-parallel", "bf16", "fp16", "use-distributed-optimizer"):
        flag(name)
    for name in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"):
        flag(name)
    number("num-distributed-optimizer-instances", default=1)
    group.add_argument("--moe-token-dispatcher-type", default="allgather")
    group.add_argument("--moe-router-dtype")
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
    flag("no-rope-fusion", unset="apply_rope_fusion")
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
        raise ValueError(
            f"--pipeline-model-parallel-layout {text[:60]!r} is no layout such as Et*3|(tt|)*29,m|L"
        )
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


# --- from arguments to a setting -------------------------------------------------------------


#: Transformer Engine's flash attention serves heads up to it on every GPU.
LARGEST_FLASH_HEAD = 256


def unsure(given: argparse.Namespace) -> dict[str, str]:
    """Counted arguments with values that a plan does not count, and a clause that says why."""
    found = {}
    if letters := set(given.hybrid_layer_pattern or "") - set(_LETTERS) - set("|/"):
        found["--hybrid-layer-pattern"] = f"layers of kind {' '.join(sorted(letters))} are not counted"
    if modules := set(given.recompute_modules or ()) - set(RECOMPUTE_MODULES):
        found["--recompute-modules"] = f"recomputing {' '.join(sorted(modules))} is not counted"
    if flash_attention(given) and not (given.bf16 or given.fp16):
        found["--bf16"] = "attention in fp32, which flash attention does not serve, is not counted"
    width = given.kv_channels or (given.hidden_size or 0) // (given.num_attention_heads or 1)
    if flash_attention(given) and width > LARGEST_FLASH_HEAD:
        found["--kv-channels"] = f"heads of {width}, which flash attention may not serve, are not counted"
    if re.search(r"m.*\|", given.pipeline_model_parallel_layout or ""):
        found["--pipeline-model-parallel-layout"] = "prediction before the last stage is not counted"
    return found


def is_hybrid(given: argparse.Namespace, program: str) -> bool:
    """Whether it trains a hybrid model: by program, pattern, or the ratios and specs of 0.15 and 0.16."""
    told = given.hybrid_layer_pattern or given.hybrid_attention_ratio or given.hybrid_mlp_ratio
    return bool(told) or "mamba" in f"{program} {given.spec}" or "hybrid" in f"{program} {given.spec}"


def flash_attention(given: argparse.Namespace) -> bool:
    """Whether attention keeps no scores."""
    engine = given.transformer_impl == "transformer_engine"
    return (engine or given.use_flash_attn) and given.attention_backend not in _LOCAL_ATTENTION


def head_alone(given: argparse.Namespace) -> argparse.Namespace:
    """A launch with the same head and plain layers, for a model that cannot be planned."""
    pipeline, tensor = given.pipeline_model_parallel_size, given.tensor_model_parallel_size
    plain = {
        "num_layers": pipeline, "num_attention_heads": tensor, "kv_channels": 64, "ffn_hidden_size": tensor,
        "group_query_attention": False, "multi_latent_attention": False, "num_experts": None,
        "hybrid_layer_pattern": None, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "spec": None,
        "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None, "expert_model_parallel_size": 1, "recompute_modules": None,
        "global_batch_size": None,
    }  # fmt: skip
    return argparse.Namespace(**{**vars(given), **plain})


def setting_of(given: argparse.Namespace, gpus: int | None = None, program: str = "") -> Setting:
    """The setting that the arguments describe.

    Args:
        gpus: of the whole run; None for the fewest that the parallel sizes take.
        program: that the launch starts.

    Raises:
        ValueError: something is missing, or two numbers contradict each other; says what to give.
    """
    model = _model(given, is_hybrid(given, program))
    parallel = _parallel(given, model, gpus)
    training = _training(given, parallel)
    padded = given.padded_vocab_size
    return Setting(model, parallel, training, given.make_vocab_size_divisible_by, padded_vocab=padded)


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


def _model(given: argparse.Namespace, hybrid: bool) -> DecoderSizes:
    hidden, heads = _needed(given, "hidden_size"), _needed(given, "num_attention_heads")
    if given.kv_channels is None and hidden % heads:
        raise ValueError(
            f"--hidden-size {hidden} cannot be divided by --num-attention-heads {heads}: change one of "
            "them, or give --kv-channels"
        )
    pattern, *predicted = (given.hybrid_layer_pattern or "").replace("|", "").split("/")
    if unknown := set(pattern + "".join(predicted)) - set(_LETTERS):
        raise ValueError(f"the hybrid pattern has {''.join(sorted(unknown))!r}; known are {_LETTERS}")
    if hybrid and not pattern:
        ratios = given.hybrid_attention_ratio, given.hybrid_mlp_ratio
        pattern = _pattern(_needed(given, "num_layers"), *ratios)
    gated, embedding = given.swiglu or given.quick_geglu, given.position_embedding_type
    rotary = embedding in ("rope", "yarn", "mrope") or given.use_rotary_position_embeddings
    ffn = given.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if given.swiglu else 4 * hidden
    positions = 0
    if embedding == "learned_absolute" and not rotary and given.add_position_embedding:
        positions = given.max_position_embeddings or _needed(given, "seq_length")
    layers = len(pattern) or _needed(given, "num_layers")
    return DecoderSizes(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=given.padded_vocab_size or _needed(given, "vocab_size"),
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


def _pattern(layers: int, attention: float, mlps: float) -> str:
    """Letters of the layers that 0.15 and 0.16 make of two ratios (mamba_hybrid_layer_allocation.py).

    Attention is spread evenly between sections of Mamba; then MLPs, evenly, over the Mamba layers.
    """
    letters = ["M"] * layers
    for letter, count in (("*", round(layers * attention)), ("-", round(layers * mlps))):
        free = [place for place in range(layers) if letters[place] == "M"]
        # Sections of Mamba: one more than attention layers, as many as MLPs.
        section = (len(free) - count) / (count + (letter == "*")) if count else layers + 1
        left = section
        for place in free:
            if left < 0.5:
                letters[place] = letter
                left += section
            else:
                left -= 1
    return "".join(letters)


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
        gathers=given.moe_token_dispatcher_type == "allgather",
        load=BUSIEST,
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
    layout = _layout(given.pipeline_model_parallel_layout) if given.pipeline_model_parallel_layout else ()
    if "|" in (pattern := (given.hybrid_layer_pattern or "").partition("/")[0]):
        layout = tuple(map(len, pattern.split("|")))
    if layout:
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
        ends_count=(
            given.account_for_embedding_in_pipeline_split,
            given.account_for_loss_in_pipeline_split,
        ),
        optimizer_instances=given.num_distributed_optimizer_instances,
    )


def _training(given: argparse.Namespace, parallel: Parallel) -> StepSettings:
    if given.bf16 and given.fp16:
        raise ValueError("both --bf16 and --fp16 are given: leave out one")
    dtype = "bfloat16" if given.bf16 else "float16" if given.fp16 else "float32"
    return StepSettings(
        sequence=_needed(given, "seq_length"),
        micro_batch=given.micro_batch_size,
        num_micro_batches=_micro_batches(given, parallel),
        dtype=dtype,
        recompute=_recompute(given),
        optimizer=_optimizer(given, dtype),
        transformer_engine=given.transformer_impl == "transformer_engine",
        flash_attention=flash_attention(given),
        rope_fusion=given.apply_rope_fusion,
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
    return Recompute(modules=tuple(given.recompute_modules or ("core_attn",)))


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
