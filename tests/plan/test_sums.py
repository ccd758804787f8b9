"""The sums of a plan: against the paper, hand-computed cases, Megatron's own models, and measured runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_fused_ce.config import STRATEGY_CHOICES, FusedCEConfig
from megatron_fused_ce.plan import answer, blocks, heads, peaks
from megatron_fused_ce.plan.answer import Gpu, advise
from megatron_fused_ce.plan.command import setting_of
from megatron_fused_ce.plan.named_models import MODELS
from megatron_fused_ce.plan.peaks import Activations, Estimate, estimate
from megatron_fused_ce.plan.setting import (
    DecoderSizes,
    Latent,
    Mixture,
    Parallel,
    Recompute,
    Setting,
    StateSpace,
    StepSettings,
)
from megatron_fused_ce.planner.choose import plan
from megatron_fused_ce.planner.memory import MIB, PlanInputs
from megatron_fused_ce.scripts.dev import figures_plan as check_plan
from tests.support.megatron import INSTALLED
from tests.support.ranks import Rank, RankProcesses

GIB = 2**30
H100 = Gpu("h100", "NVIDIA H100 80GB HBM3", 80 * GIB, exp_serves=True, overhead=0)

#: A dense decoder of today.
MODERN = DecoderSizes(
    num_layers=4, hidden_size=64, num_attention_heads=8, vocab_size=1000, ffn_hidden_size=160, head_dim=8,
    num_query_groups=4, gated=True, rms_norm=True, linear_bias=False, rotary=True, tied=False,
)  # fmt: skip
#: The layer of Korthikanti et al. 2022: GELU, as many keys as queries, dropout.
PAPER = DecoderSizes(
    num_layers=3, hidden_size=96, num_attention_heads=12, vocab_size=1000, ffn_hidden_size=4 * 96, head_dim=8,
    num_query_groups=12, learned_positions=64,
)  # fmt: skip
LATENT = replace(MODERN, latent=Latent(24, 16, 8, 4, 8))


def setting(model: DecoderSizes = MODERN, parallel: Parallel = Parallel(), **training) -> Setting:  # noqa: B008
    return Setting(model, parallel, StepSettings(**{"sequence": 256, **training}), vocab_divisor=1)


def native(one: Setting) -> Estimate:
    return estimate(one, heads.stock_head(one, "native"))


def kept_by_a_layer(one: Setting) -> float:
    """Bytes of one layer and one token that nothing computes again."""
    return sum(blocks.kinds(one)[letter].kept for letter in blocks.layers(one.model)[0])


def block(letter: str, model: DecoderSizes, **training) -> blocks.Block:
    return blocks.kinds(setting(model, **training))[letter]


def mixed(ffn: int = 40, shared: int = 24, load: float = 1, **others) -> DecoderSizes:
    """3 of 8 experts."""
    return replace(MODERN, mixture=Mixture(8, 3, ffn, shared, (True,) * 4, load=load), **others)


# --- activations -----------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "sequence"), [(1, 16), (2, 128), (4, 128)])
def test_a_layer_keeps_what_the_paper_says(t, sequence):
    """Its equations 1, 2 and 4, and the one of selective recomputation, over s*b."""
    old = {"sequence": sequence, "attention_dropout": True, "hidden_dropout": True}
    old |= {"transformer_engine": False, "flash_attention": False}
    h, a = PAPER.hidden_size, PAPER.num_attention_heads
    scores = 5 * a * sequence
    tensor, both = (Parallel(gpus=t, tensor=t, sequence=sp) for sp in (False, True))
    assert kept_by_a_layer(setting(PAPER, tensor, **old)) == h * (10 + 24 / t) + scores / t
    assert kept_by_a_layer(setting(PAPER, both, **old)) == (34 * h + scores) / t
    selective = Recompute(modules=("core_attn",))
    assert kept_by_a_layer(setting(PAPER, both, recompute=selective, **old)) == 34 * h / t


def test_flash_attention_grouped_queries_and_a_gate():
    """Hand-computed: H = 64, 8 heads of 8, 4 groups, F = 160; no dropout. And rotation without its kernel."""
    row, qkv, mlp = 2 * 64, 2 * (64 + 2 * 32), 2 * (2 * 160 + 160)
    assert kept_by_a_layer(setting()) == 4 * row + qkv + row + 4 * 8 + mlp
    for micro_batch in (1, 4):
        fused, own = (setting(rope_fusion=fused, micro_batch=micro_batch) for fused in (True, False))
        assert kept_by_a_layer(own) - kept_by_a_layer(fused) == 4 * 2 * 8 / micro_batch


OWN, BOTH = {"transformer_engine": False}, replace(LATENT, mixture=mixed().mixture)


@pytest.mark.parametrize(
    ("model", "modules", "layers", "saves"),
    [
        (MODERN, "core_attn", {}, 4 * 8),
        # Transformer Engine's first product has the norm in it: with the MLP it is computed again as well.
        (MODERN, "mlp", {}, 2 * 3 * 160 + 2 * 64),
        (MODERN, "layernorm", {}, 0),
        (MODERN, "moe shared_experts mla_up_proj moe_act", {}, 0),
        # Norms of Megatron's own layers stand alone; an MLP's input is then its norm's output, which is kept.
        (MODERN, "layernorm", OWN, 2 * 2 * 64),
        (MODERN, "mlp", OWN, 2 * 3 * 160),
        (MODERN, "mlp layernorm", OWN, 2 * 3 * 160 + 2 * 2 * 64),
        # So do those of latent attention and experts.
        (BOTH, "layernorm", {}, 2 * 2 * 64),
        (BOTH, "moe", {}, 2 * 4 * 8 + 2 * 3 * (64 + 120) + 2 * 3 * 24),
        (BOTH, "mla_up_proj", {}, 2 * 8 * (2 * 12 + 8)),
    ],
)
def test_selective_recompute_drops_its_modules(model, modules, layers, saves):
    kept = kept_by_a_layer(setting(model, recompute=Recompute(modules=tuple(modules.split())), **layers))
    assert kept_by_a_layer(setting(model, **layers)) - kept == saves


def test_latent_attention_without_flash_attention_keeps_its_scores():
    """Softmax, and with dropout a mask and its result, 8 heads against 256 tokens; then two more."""
    for dropout, kept in ((False, 2), (True, 5)):
        flash, unfused = (
            block("*", LATENT, flash_attention=on, attention_dropout=dropout) for on in (True, False)
        )
        assert unfused.kept - flash.kept == kept * 8 * 256 - 4 * 8
        assert unfused.backward - flash.backward == 2 * 2 * 8 * 256 - 4 * 8 * (8 + 4)


def test_a_mamba_mixer_keeps_the_scan_before_and_behind_its_gate():
    """Hand-computed: 4 heads of 32, a state of 16, 2 groups."""
    mixer = block("M", replace(MODERN, pattern="M*M-", state_space=StateSpace(4, 32, 16, 2)))
    product, scan = 2 * (2 * 128 + 2 * 2 * 16 + 4), 3 * 2 * 128 + 4 * 2
    assert (mixer.parts["input product"], mixer.parts["scan, gate and norm"]) == (product, scan)
    states = (4 + 4 + 2 + 2) * 128 * 16 / 128
    within = 4 * 2 * 128  # the products of B and C in a chunk of 128 tokens
    assert mixer.backward == 2 * (2 * 128 + 2 * 2 * 16 + 4 + 2 * (128 + 2 * 2 * 16)) + states + within


def test_experts_keep_the_tokens_they_are_sent():
    """Hand-computed: 3 of 8 experts of 40 rows, and a shared one of 24, in place of the MLP's 160."""
    sizes = [2 * 4 * 8, 2 * 3 * 64, 2 * 3 * 80, 2 * 3 * 40, 2 * 3 * 24]
    assert list(block("E", mixed()).parts.values())[2:] == sizes
    # Without a gate's fused kernel, what the router's weight is multiplied into as well; all with the load.
    parts = block("E", mixed(gated=False, load=1.5)).parts
    assert parts["activation"] == parts["activation before its weight"] == 1.5 * 2 * 3 * 40
    # At work: sorting; the first product's gradient; the second product's two.
    at_work = [block("E", mixed(*how, gated=gated)).backward
               for how, gated in (((40, 0), True), ((100, 0), True), ((100, 0), False))]  # fmt: skip
    assert at_work == [2 * 2 * 3 * 64, 2 * 3 * 200, 2 * 3 * (64 + 100)]


def test_recompute_in_units_and_blocks():
    """An input a layer; in pairs both layers of a unit are there while its second runs backward."""
    row, whole = 2 * 64 * 256, kept_by_a_layer(setting()) * 256
    units = (Recompute(True, 1), Recompute(True, 2), Recompute(True, 3, block=True))
    alone, pairs, block_ = (native(setting(recompute=unit)) for unit in units)
    kept = [found.moment("head").parts["activations"] for found in (alone, pairs, block_)]
    assert kept == [4 * row, 2 * row, 3 * row + whole]
    # The first layer's backward runs last: with three inputs fewer, so the last one's is the worst.
    assert alone.moment("layers").parts["activations"] == 3 * row
    # All that a layer keeps, its output, the gradient of it, and of the first product.
    work = alone.moment("layers").parts["layer at work"]
    assert work == whole + 256 * (2 * 2 * 64 + 2 * 2 * 160)
    assert pairs.moment("layers").parts["layer at work"] - work == whole - row


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches", "layers"),
    [
        (4, 1, None, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        # Warm-up of 2 * (stages behind) + (chunks - 1) * stages, and one.
        (2, 2, None, [5, 3]),
        (2, 2, 1, [2, 2]),
    ],
)
def test_micro_batches_in_flight(pipeline, chunks, micro_batches, layers):
    """Layers whose activations wait on each stage, with one layer in each chunk."""
    model = replace(MODERN, num_layers=pipeline * chunks)
    parallel = Parallel(gpus=pipeline, pipeline=pipeline, chunks=chunks)
    one = setting(model, parallel, num_micro_batches=micro_batches)
    waiting = [Activations(one, stage).waiting() for stage in peaks.stages(one)]
    a_layer = kept_by_a_layer(one) * one.num_tokens
    assert [size / a_layer for size in waiting] == layers


def test_chunks_of_a_pattern_and_ends_that_count_as_layers():
    """6 layers, embedding and loss over 4 stages of 2 chunks: the first and the last chunk are empty."""
    parallel = Parallel(gpus=4, pipeline=4, chunks=2, ends_count=(True, True))
    assert parallel.chunk_layers(6) == [0, 1, 1, 1, 1, 1, 1, 0]
    found = peaks.stages(setting(replace(MODERN, num_layers=6), parallel))
    assert [[len(chunk) for chunk in stage.chunks] for stage in found] == [[0, 1], [1, 1], [1, 1], [1, 0]]


# --- weights, gradients, optimizer -----------------------------------------------------------


def test_static_memory_by_hand():
    """2 + 4 bytes a parameter, and 12 over the data-parallel ranks; experts over their own."""
    llama = setting_of(["--model", "llama-3.2-1b", "--gpus", "4", "--seq-length", "1024"])
    count, (stage,) = 1_235_814_400, peaks.stages(llama)
    assert peaks.counts(llama, stage) == (count, 0)
    assert list(peaks.static(llama, stage).values()) == [2 * count, 4 * count, 3 * count, 0]
    whole = replace(llama, training=replace(llama.training, distributed_optimizer=False, step_bytes=4))
    assert list(peaks.static(whole, stage).values()) == [2 * count, 4 * count, 12 * count, 4 * count]
    # Two instances of the optimizer over 4 ranks: each has all of it.
    two = replace(llama, parallel=replace(llama.parallel, optimizer_instances=2))
    assert peaks.static(two, stage)["optimizer"] == 6 * count
    # 8 GPUs, EP 4: a rank has a quarter of the experts, whose optimizer 2 ranks share.
    one = setting(mixed(shared=0), Parallel(gpus=8, expert=4))
    (stage,) = peaks.stages(one)
    dense, experts = peaks.counts(one, stage)
    assert experts == 4 * 2 * 3 * 64 * 40
    assert peaks.static(one, stage)["optimizer"] == 12 * dense // 8 + 12 * experts // 2


@pytest.mark.parametrize("name", MODELS)
def test_named_models_have_the_parameters_that_are_published(name):
    """To the last digit that is."""
    one = setting_of(["--model", name, "--seq-length", "64"])
    alone = replace(one, model=replace(one.model, mtp_num_layers=0), vocab_divisor=1)
    counted = peaks.parameters(alone)
    if MODELS[name].published.endswith("*"):
        tables = 2 * one.model.vocab_size * one.model.hidden_size
        counted = peaks.parameters(replace(one, vocab_divisor=1)) + tables
    published = MODELS[name].published.rstrip("*")
    digits = len(published.partition(".")[2])
    assert f"{counted / 1e9:.{digits}f}" == published


MTP = replace(MODERN, mtp_num_layers=1)
_CASES = {
    "modern, padded, TP 2": (MODERN, Parallel(gpus=2, tensor=2)),
    "GELU, biases, LayerNorm, learned positions": (PAPER, Parallel(gpus=4, tensor=4)),
    "bias of queries alone": (replace(MODERN, qkv_bias=True), Parallel(gpus=2, tensor=2)),
    "heads wider than the hidden size, normed": (replace(MODERN, head_dim=16, qk_norm=True), Parallel()),
    "two stages, untied, MTP": (MTP, Parallel(gpus=4, tensor=2, pipeline=2)),
    "two stages, tied, MTP": (replace(MTP, mtp_num_layers=2, tied=True), Parallel(gpus=2, pipeline=2)),
    "experts, dense first, shared": (
        replace(MODERN, mixture=Mixture(4, 2, 48, 24, (False, True, True, True))),
        Parallel(gpus=4, tensor=2, expert=2, expert_tensor=1),
    ),
    "latent attention": (replace(LATENT, qk_norm=True), Parallel()),
}
#: Megatron's names for sizes of a decoder, and of the ranks.
CONFIG = {"num_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads":
          "num_attention_heads", "num_query_groups": "num_query_groups", "ffn_hidden_size": "ffn_hidden_size",
          "kv_channels": "head_dim", "gated_linear_unit": "gated", "add_bias_linear": "linear_bias",
          "add_qkv_bias": "qkv_bias", "qk_layernorm": "qk_norm"}  # fmt: skip


def stages_in_megatron(_: Rank, name: str) -> None:
    """Each stage has as many parameters as its first rank holds of Megatron's own GPTModel. Groups are
    torch's fake ones: nothing is ever sent."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, parallel = _CASES[name]
    one = setting(model, parallel)
    dims = ("tensor", "pipeline", "expert")
    ranks = {f"{name}_model_parallel_size": getattr(parallel, name) for name in dims}
    ranks["expert_tensor_parallel_size"] = parallel.expert_tensor
    config = (MLATransformerConfig if model.latent else TransformerConfig)(
        **megatron_config(model), **ranks, pipeline_dtype=torch.float32, use_cpu_initialization=True
    )
    for number, stage in enumerate(peaks.stages(one)):
        rank = number * parallel.gpus // parallel.pipeline
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.gpus)
        parallel_state.initialize_model_parallel(**ranks, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if model.latent:
            # It asks for Transformer Engine's classes, which are not there; Megatron's own attention, which
            # has no parameters, refuses keys wider than values.
            multi_latent_attention.HAVE_TE = False
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
        built = GPTModel(
            config,
            spec,
            vocab_size=one.padded_vocab_size,
            max_sequence_length=model.learned_positions or 64,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="learned_absolute" if model.learned_positions else "rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        )
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        assert sum(peaks.counts(one, stage)) == sum(map(torch.numel, built.parameters())), stage


def megatron_config(model: DecoderSizes) -> dict:
    config = {name: getattr(model, ours) for name, ours in CONFIG.items()}
    config["normalization"] = "RMSNorm" if model.rms_norm else "LayerNorm"
    config["mtp_num_layers"] = model.mtp_num_layers or None
    if model.latent:
        config |= {**vars(model.latent), "multi_latent_attention": True, "rope_type": "rope"}
        del config["num_query_groups"], config["kv_channels"]
    if mixture := model.mixture:
        config |= {"num_moe_experts": mixture.num_experts, "moe_router_topk": mixture.topk}
        config["moe_ffn_hidden_size"] = mixture.ffn_hidden_size
        config["moe_shared_expert_intermediate_size"] = mixture.shared_ffn_hidden_size
        config["moe_layer_freq"] = list(map(int, mixture.layers))
    return config


@pytest.mark.parametrize("name", _CASES)
def test_a_stage_has_the_parameters_of_megatrons_own_model(name):
    with RankProcesses(1, INSTALLED, joins=False) as world:
        world.run(stages_in_megatron, name)


# --- heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "per_logit", "waiting"), [("unfused", 6, 4), ("native", 10, 4), ("te", 4, 2)]
)
def test_megatrons_heads_by_hand(name, per_logit, waiting):
    one = setting(replace(MODERN, vocab_size=32768), sequence=4096)
    head = heads.stock_head(one, name)
    assert head.peak == per_logit * 4096 * 32768 + 64 * MIB
    later = heads.stock_head(replace(one, model=replace(one.model, mtp_num_layers=2)), name)
    assert later.peak - head.peak == 2 * waiting * 4096 * 32768
    # A small vocabulary is bound by the layer's backward products: 2 bytes a logit, grad_hidden, and without
    # fusion grad_weight, more than TE's loss at T = 32.
    few = setting(replace(MODERN, vocab_size=512), sequence=32, gradient_fusion=False)
    products = 2 * 32 * 512 + 2 * 32 * 64 + 2 * 512 * 64 + 64 * MIB
    assert heads.stock_head(few, name).peak >= products
    assert name != "te" or heads.stock_head(few, name).peak == products


def test_the_plugins_heads_are_the_planners():
    one = setting_of(["--model", "llama-3-8b", "--gpus", "8", "--tp", "4", "--sequence-parallel",
                      "--seq-length", "32768", "--make-vocab-size-divisible-by", "32"])  # fmt: skip
    for strategy in STRATEGY_CHOICES:
        head = heads.plugin_head(one, "NVIDIA H200", strategy, exp_serves=True)
        chosen = plan(
            PlanInputs(32768, 4096, 32064, num_parts=4, tp_size=4, token_weights_known=True,
                       device="NVIDIA H200", config=FusedCEConfig(strategy=strategy))
        )  # fmt: skip
        assert head.predicted == chosen.predicted_peak_bytes
        grad_hidden = 2 * 32768 * 4096 // 4
        # grad_in_forward's backward runs no product of torch's, whose workspace the planner counts.
        unused = 32 * MIB if chosen.strategy == "grad_in_forward" else 0
        assert head.peak == chosen.predicted_peak_bytes + grad_hidden - unused


@pytest.mark.parametrize(
    ("others", "flags", "rows"),
    [
        ("--bf16", "--fused-ce-mask-padded-vocab --fused-ce-skip-masked", False),
        ("--bf16", "--fused-ce-label-smoothing 0.1 --fused-ce-logit-softcap 30", True),
        ("--fp16", "", True),
        ("--bf16 --vocab-size 128257 --make-vocab-size-divisible-by 1", "", True),
    ],
)
def test_what_goes_through_the_row_kernels(others, flags, rows):
    """They take no buffers of tiles, but a chunk of logits more for store."""
    launch = f"{MODELS['llama-3.2-1b'].arguments} --seq-length 8192 {others} {flags}"
    one = setting_of(["--from-launch", launch])
    found = heads.plugin_head(one, "NVIDIA H200", "store", exp_serves=True)
    chunk = 2 * 8192 * one.vocab_rows
    assert (found.predicted > 2 * chunk) == rows
    assert set(flags.split()) <= set(found.flags.split())


# --- advice ----------------------------------------------------------------------------------


def test_a_budget_where_only_a_smaller_head_fits():
    """A GPU between what auto and what recompute need."""
    words = ["--model", "qwen3-0.6b", "--seq-length", "16384", "--recompute-granularity", "full"]
    one = setting_of(words)
    wide = advise(one, replace(H100, capacity=400 * GIB))
    auto, least = wide.way("auto"), wide.way("recompute")
    assert auto.bound.name == "head"
    between = (auto.peak + max(least.moment("layers").total, least.moment("head").total)) // 2
    found = advise(one, replace(H100, capacity=between))
    assert found.way("auto").verdict == "does not fit"
    assert "--fused-ce-memory-mb" in found.recommended.head.flags
    assert found.recommended.verdict == "fits"
    assert found.recommended.peak <= between


def test_tight_is_told_apart():
    """Free memory below 0.3 of the largest tensor; the fp32 logits of the unfused path have 4*T*V bytes."""
    one = setting(replace(MODERN, vocab_size=100_000), sequence=8192)
    found = estimate(one, heads.stock_head(one, "unfused"))
    largest = 4 * 8192 * 100_000
    for free, said in ((-1, "does not fit"), (0.29, "tight"), (0.31, "fits")):
        gpu = replace(H100, capacity=found.peak + int(free * largest))
        assert answer.verdict(found, gpu) == said


# --- against what was measured ---------------------------------------------------------------


def test_enough_was_measured():
    """tests/project/test_docs.py runs `make figures`, which holds each against its bound."""
    trained = [one for one in check_plan.steps() if one.measured is not None]
    assert len(trained) > 40
    # What bounds the run is told right as well: both kinds were measured.
    assert {one.bound for one in trained} == {"head", "layers"}
    assert len(check_plan.alone()) > 60


def test_what_is_further_off_is_named_and_no_exception_is_one_for_nothing():
    near, far = (check_plan.Compared("[TP 4](file), 4096", "auto", 1000.0, 1000.0 + d) for d in (14, -16))
    assert len(check_plan.outside([near, far], check_plan.STEP_BOUND)) == 1
    off = {one.what: one.off for one in check_plan.steps()}
    for graph in check_plan.EXCEPTIONS:
        assert any(abs(of) > check_plan.STEP_BOUND for what, of in off.items() if graph in what)


def test_what_ran_out_of_memory_is_not_said_to_fit():
    for name, row in check_plan.launches():
        one = check_plan.setting_of_launch(row)
        found = estimate(one, check_plan.head_of(one, row["variant"]))
        verdict = answer.verdict(found, check_plan.h200())
        assert (verdict == "fits") == (row["status"] == "ok"), (name, row["variant"])
