"""Megatron's own arguments that decide how many bytes a GPU holds, and the setting from them.

Names, kinds, defaults and values are those of ``arguments.tsv`` (:mod:`.closed_world`), the newest version's;
here is what each means.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

from megatron_fused_ce.adapter.arguments import config_from_args
from megatron_fused_ce.cli.command_line import number, whole
from megatron_fused_ce.plan.closed_world import arguments, flash_attention, is_hybrid
from megatron_fused_ce.plan.named_models import vocabulary_of
from megatron_fused_ce.plan.setting import (
    LETTERS,
    DecoderSizes,
    Latent,
    Mixture,
    Parallel,
    Recompute,
    Setting,
    StateSpace,
    StepSettings,
)

#: Defaults of a plan by name or numbers: today's usual settings.
USUAL = (
    *("--bf16", "--use-distributed-optimizer", "--no-create-attention-mask-in-dataloader"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
#: Not counted, but for what they change of the head's numbers.
_OF_THE_HEAD = ("quick_geglu", "use_megatron_fsdp", "use_torch_fsdp2")
#: Other names of an argument.
_ALSO = {
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "context_parallel_size": "--cp",
    "expert_model_parallel_size": "--ep",
    "hybrid_layer_pattern": "--hybrid-override-pattern",
}
_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
MOST_LAYERS = 10**5
#: Tokens of the busiest rank's experts over an even spread: no router spreads them evenly in every step (the
#: records of tests/plan/megatron_records.tsv lie at 1.0 to 1.3).
BUSIEST = 1.1


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that are counted, and what a head's numbers depend on."""
    group = parser.add_argument_group("Megatron's arguments")
    kinds: dict[str, Any] = {"a share": number(most=1), "layers": _layer_frequency}
    for name, known in arguments().items():
        counted = known.which.split()[:1] == ["counted"] and name != "hybrid_override_pattern"
        if not counted and name not in _OF_THE_HEAD:
            continue
        flag, kind = known.option, known.options[known.option]
        flags = [flag, _ALSO[name]] if name in _ALSO else [flag]
        if kind in "TF":
            action = "store_true" if kind == "T" else "store_false"
            group.add_argument(*flags, dest=name, action=action)
        elif kind == "*":
            group.add_argument(*flags, dest=name, nargs="*")
        else:
            # Megatron makes a micro-batch's of others; here it has one.
            default = next(value for value in reversed(known.defaults) if value != ".")
            default = "1" if name == "micro_batch_size" else default.removeprefix("AttnBackend.")
            choices = known.why.split()[2:] if known.why.startswith("one of ") else None
            bounds = re.fullmatch(r"(\d+) to (\d+)", known.why)
            of = whole(int(bounds[1]), int(bounds[2])) if bounds else kinds.get(known.why, str)
            group.add_argument(
                *flags, dest=name, metavar=None if choices else "X", choices=choices, type=of,
                default=None if default == "None" else default,
            )  # fmt: skip
    group.add_argument(
        "--post-norms",
        action="store_true",
        help="not Megatron's: norms behind attention and MLP as well (Gemma 2)",
    )


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

    def repeated(match: re.Match[str]) -> str:
        if len(match[1]) * int(match[2]) > 2 * MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} has more than {MOST_LAYERS} layers")
        return f"[{','.join([match[1]] * int(match[2]))}]"

    found, before = re.sub(r"\s", "", text), ""
    while found != before and len(found) <= 2 * MOST_LAYERS:
        before = found
        found = re.sub(r"\((\[[01,]*\])\)", r"\1", found)
        found = re.sub(r"\[([01,]+)\]\*(\d{1,6})", repeated, found).replace("]+[", ",")
    if not re.fullmatch(r"\d{1,5}|\[[01](,[01])*\]", found):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no number and no list of 0 and 1, of at most {MOST_LAYERS}"
        )
    return int(found) if found.isdigit() else [int(digit) for digit in found[1:-1].split(",")]


# --- from arguments to a setting -------------------------------------------------------------


#: What describes layers, stages and batches, of which a head knows nothing.
_OF_LAYERS = (
    *("group_query_attention", "multi_latent_attention", "num_experts", "hybrid_layer_pattern", "spec"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("pipeline_model_parallel_layout", "recompute_modules"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "global_batch_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def head_alone(given: argparse.Namespace) -> argparse.Namespace:
    """A launch with the same head and plain layers, for a model that cannot be planned."""
    plain: dict[str, Any] = dict.fromkeys(_OF_LAYERS) | {"kv_channels": 64, "expert_model_parallel_size": 1}
    plain["num_layers"] = given.pipeline_model_parallel_size
    plain["num_attention_heads"] = plain["ffn_hidden_size"] = given.tensor_model_parallel_size
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
    if value is not None:
        return value
    size = vocabulary_of(getattr(given, "tokenizer", "")) if name == "vocab_size" else None
    option, where = f"--{name.replace('_', '-')}", ", or --model NAME, --from-log FILE or --from-launch FILE"
    if getattr(given, "from_log", None) or getattr(given, "from_launch", None):
        where = " beside the launch"
    elif name == "seq_length":  # no model has a length of its own
        where = ""
    known = f"{option} {size}{where}, as {given.tokenizer} has" if size else f"it{where}"
    raise ValueError(f"{option} is missing: give {known}")


def _model(given: argparse.Namespace, hybrid: bool) -> DecoderSizes:
    hidden, heads = _needed(given, "hidden_size"), _needed(given, "num_attention_heads")
    if given.kv_channels is None and hidden % heads:
        raise ValueError(
            f"--hidden-size {hidden} cannot be divided by --num-attention-heads {heads}: change one of "
            "them, or give --kv-channels"
        )
    pattern, *predicted = (given.hybrid_layer_pattern or "").replace("|", "").split("/")
    if strange := set(pattern + "".join(predicted)) - set(LETTERS):
        raise ValueError(f"the hybrid pattern has {''.join(sorted(strange))!r}; known are {LETTERS}")
    if hybrid and not pattern:
        pattern = "M" * _needed(given, "num_layers")
    embedding, positions = given.position_embedding_type, 0
    rotary = embedding in ("rope", "yarn", "mrope") or given.use_rotary_position_embeddings
    if embedding == "learned_absolute" and not rotary and given.add_position_embedding and not pattern:
        positions = given.max_position_embeddings or _needed(given, "seq_length")
    layers = len(pattern) or _needed(given, "num_layers")
    ffn = given.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if given.swiglu else 4 * hidden
    latent = mixture = state_space = None
    if given.multi_latent_attention:
        sizes = (given.qk_head_dim, given.qk_pos_emb_head_dim, given.v_head_dim)
        latent = Latent(given.q_lora_rank, given.kv_lora_rank, *sizes)
    if given.num_experts:
        every = given.moe_layer_freq
        if isinstance(every, int):
            every = [index % max(1, every) == 0 for index in range(layers)]
        mixture = Mixture(
            given.num_experts,
            given.moe_router_topk,
            given.moe_ffn_hidden_size or ffn,
            given.moe_shared_expert_intermediate_size or 0,
            tuple(map(bool, every)),
            gathers=given.moe_token_dispatcher_type == "allgather",
            load=BUSIEST,
        )
    if "M" in pattern:
        num_heads = given.mamba_num_heads or 2 * hidden // given.mamba_head_dim
        state_space = StateSpace(
            num_heads, given.mamba_head_dim, given.mamba_state_dim, given.mamba_num_groups
        )
    return DecoderSizes(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=given.padded_vocab_size or _needed(given, "vocab_size"),
        ffn_hidden_size=ffn,
        num_query_groups=given.num_query_groups if given.group_query_attention else heads,
        head_dim=given.kv_channels or hidden // heads,
        gated=given.swiglu or given.quick_geglu,
        tied=not given.untie_embeddings_and_output_weights,
        rms_norm=given.normalization == "RMSNorm",
        linear_bias=given.add_bias_linear,
        qkv_bias=given.add_qkv_bias,
        qk_norm=given.qk_layernorm,
        post_norms=given.post_norms,
        learned_positions=positions,
        rotary=rotary,
        mtp_num_layers=len(predicted) or given.mtp_num_layers or 0,
        pattern=pattern,
        prediction_pattern=predicted[0] if predicted else "",
        latent=latent,
        mixture=mixture,
        state_space=state_space,
    )


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
    ends = given.account_for_embedding_in_pipeline_split, given.account_for_loss_in_pipeline_split
    return Parallel(
        gpus=gpus or tensor * pipeline * max(context, -(-expert * expert_tensor // tensor)),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence=given.sequence_parallel and tensor > 1,
        chunks=max(1, len(layout) // pipeline) if layout else chunks,
        first_stage_layers=given.decoder_first_pipeline_num_layers,
        last_stage_layers=given.decoder_last_pipeline_num_layers,
        layout=layout,
        ends_count=(bool(ends[0]), bool(ends[1])),
        optimizer_instances=given.num_distributed_optimizer_instances,
    )


def _training(given: argparse.Namespace, parallel: Parallel) -> StepSettings:
    if given.bf16 and given.fp16:
        raise ValueError("both --bf16 and --fp16 are given: leave out one")
    sequence = _needed(given, "seq_length")
    batch, at_once = given.global_batch_size, given.micro_batch_size * parallel.data
    if batch and batch % at_once:
        raise ValueError(
            f"--global-batch-size {batch} cannot be divided into micro-batches of "
            f"{given.micro_batch_size} on {parallel.data} data-parallel ranks: give a multiple of {at_once}"
        )
    recompute = Recompute()
    if given.recompute_activations or given.recompute_granularity == "selective":
        recompute = Recompute(modules=tuple(given.recompute_modules or ("core_attn",)))
    elif given.recompute_granularity == "full":
        recompute = Recompute(True, given.recompute_num_layers, given.recompute_method == "block")
    # Main weights and both moments of a parameter, and whether gradients are kept in 2 bytes.
    aware, low, states = given.use_precision_aware_optimizer, False, 8
    if given.bf16 or given.fp16:
        in_fp32 = given.bf16 or given.accumulate_allreduce_grads_in_fp32
        low = given.grad_reduce_in_bf16 or (aware and given.main_grads_dtype != "fp32") or not in_fp32
        states = 12
    if aware:
        names = (given.main_params_dtype, given.exp_avg_dtype, given.exp_avg_sq_dtype)
        states = sum(_DTYPE_BYTES[name] for name in names)
    # The plugin's flags, as a launch would read them; the vocabulary's size is the model's.
    asked = {**vars(given), "fused_chunked_ce": True, "fused_ce_mask_padded_vocab": False}
    config = config_from_args(argparse.Namespace(**asked))
    assert config is not None
    if given.fused_ce_mask_padded_vocab:
        config = replace(config, true_vocab_size=given.vocab_size)
    return StepSettings(
        sequence=sequence,
        micro_batch=given.micro_batch_size,
        num_micro_batches=batch and batch // at_once,
        dtype="bfloat16" if given.bf16 else "float16" if given.fp16 else "float32",
        recompute=recompute,
        transformer_engine=given.transformer_impl == "transformer_engine",
        flash_attention=flash_attention(given),
        rope_fusion=given.apply_rope_fusion,
        attention_dropout=given.attention_dropout > 0,
        hidden_dropout=given.hidden_dropout > 0,
        attention_mask=given.create_attention_mask_in_dataloader,
        gradient_fusion=given.gradient_accumulation_fusion
        and not (given.use_megatron_fsdp or given.use_torch_fsdp2),
        fused_ce=config,
        distributed_optimizer=given.use_distributed_optimizer,
        gradient_bytes=2 if low else 4,
        state_bytes=states,
        step_bytes=4 if low and not aware else 0,  # Megatron steps with fp32 gradients
    )
