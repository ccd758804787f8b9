"""Megatron's own models with the flag off and on: every parameter's gradient, losses, MTP metrics.

Each test builds the same model twice from one seed and runs two micro-batches in Megatron's DDP.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.megatron import (
    BATCH,
    DDP,
    GRADIENT_BOUND,
    INSTALLED,
    LOSS_BOUND,
    NEWEST,
    SEQUENCE,
    VOCAB,
    Model,
    batches_half_right,
    build,
    check_accuracy,
    core_version,
    forward,
    have_groups,
    needs_core,
    of_core,
    positions_and_mask,
    rollout,
    run_schedule,
    takes_mask,
)
from tests.support.ranks import Rank, Ranks, on_ranks

#: TP 2 with one core, 4 with the other, which :func:`test_the_installed_core` runs at 2.
MODELS, IN_DDP = (
    [
        of_core(2, NEWEST, needs_nccl=needs_nccl),
        of_core(1, NEWEST, pytest.mark.rest),
        of_core(4, INSTALLED),
    ]
    for needs_nccl in ("", DDP)
)
BY_NAME = {
    "gpt": Model(),
    "gpt store": Model(strategy="store"),
    "gpt tied": Model(tied=True),
    "gpt sp": Model(sequence_parallel=True),
    "gpt bf16 sp": Model(sequence_parallel=True, dtype=torch.bfloat16),
    "gpt mtp 1": Model(mtp=1),
    "gpt mtp 2 tied": Model(mtp=2, tied=True),
    "gpt mtp 2 sp": Model(mtp=2, sequence_parallel=True),
    "gpt fused wgrad": Model(fused_wgrad=True),
    "gpt fused wgrad tied mtp 1 overlap": Model(fused_wgrad=True, tied=True, mtp=1, overlap=True),
    "gpt fused wgrad sp overlap store": Model(
        fused_wgrad=True, sequence_parallel=True, overlap=True, strategy="store"
    ),
    "gpt grad_in_forward": Model(strategy="grad_in_forward"),
    "gpt grad_in_forward sp": Model(strategy="grad_in_forward", sequence_parallel=True),
    "gpt grad_in_forward bf16": Model(strategy="grad_in_forward", dtype=torch.bfloat16),
    "gpt grad_in_forward fused wgrad tied mtp 1 overlap": Model(
        strategy="grad_in_forward", fused_wgrad=True, tied=True, mtp=1, overlap=True
    ),
    "gpt masked tokens skipped": Model(strategy="store", skip_masked=True),
    "gpt masked tokens skipped grad_in_forward sp mtp 1": Model(
        strategy="grad_in_forward", skip_masked=True, sequence_parallel=True, mtp=1
    ),
    "hybrid grad_in_forward": Model(strategy="grad_in_forward", family="hybrid"),
    "hybrid": Model(family="hybrid"),
    "hybrid tied sp": Model(family="hybrid", tied=True, sequence_parallel=True),
}
#: Not in megatron-core 0.16.
SINCE_0_17 = {
    "gpt mup": Model(mup=True),
    "gpt mup mtp 1": Model(mup=True, mtp=1),
    "hybrid mtp 1": Model(family="hybrid", mtp=1),
    "gpt mtp 1 detached heads": Model(mtp=1, extra={"mtp_detach_heads": True}),
}
ACCURACY = (
    *("gpt", "gpt sp", "gpt bf16 sp", "gpt mtp 2 tied", "gpt grad_in_forward", "gpt store"),
    *("gpt masked tokens skipped grad_in_forward sp mtp 1", "hybrid mtp 1"),
)


def model_of(rank: Rank, name: str) -> Model:
    """Skips what this rank's core, or a group of one, does not have."""
    if name in SINCE_0_17:
        needs_core(0, 19)
    model = {**BY_NAME, **SINCE_0_17}[name]
    if rank.size == 1 and model.sequence_parallel:
        pytest.skip("one rank has no sequence parallelism")
    return model


def train_two_micro_batches(model: Model, rank: Rank) -> dict[str, torch.Tensor]:
    """Losses, every parameter's accumulated gradient, and the MTP metrics, by name."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    built = build(model, rank)
    ddp = DistributedDataParallel(
        built.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=model.overlap, bucket_size=1
        ),
        built,
    )
    ddp.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    generator = torch.Generator().manual_seed(3)
    results = {}
    for micro_batch in range(2):
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator).to(rank.device)
        mask = torch.rand(BATCH, SEQUENCE, generator=generator).to(rank.device)
        if model.skip_masked:
            mask[mask < 0.7] = 0.0
        last = micro_batch == 1
        with contextlib.nullcontext() if last or not model.overlap else ddp.no_sync():
            given = {"loss_mask": mask} if takes_mask(model) else {}
            loss = ddp(ids[:, :-1], *positions_and_mask(rank), labels=ids[:, 1:], **given)
            MTPLossAutoScaler.set_loss_scale(torch.tensor(0.5, device=rank.device))
            assert isinstance(loss, torch.Tensor) and loss.shape == (BATCH, SEQUENCE)
            (loss * mask).sum().backward()
        told = loss * mask if model.skip_masked else loss
        results[f"loss of micro-batch {micro_batch}"] = told.detach().clone()
    ddp.finish_grad_sync()
    for name, parameter in built.named_parameters():
        assert parameter.main_grad is not None, name
        results[f"gradient of {name}"] = parameter.main_grad.detach().clone()
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            results[f"MTP {name}"] = value.clone()
    return results


def _noting(seen: list[list[int]], read: Any) -> Any:
    def noted(copy: Any) -> list[int]:
        seen.append(read(copy))
        return seen[-1]

    return noted


@on_ranks(*IN_DDP)
@pytest.mark.parametrize("name", [*BY_NAME, *SINCE_0_17])
def test_off_against_on(rank: Rank, name):
    import megatron_fused_ce
    from megatron_fused_ce import masked_tokens, promise
    from megatron_fused_ce.host_copy import HostCopy

    model = model_of(rank, name)
    read: list[list[int]] = []
    have_groups(rank.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_tokens, "ROUND_TO", 2)
        patch.setattr(HostCopy, "read", _noting(read, HostCopy.read))
        patch.setattr(promise, "counts", promise.Counts())
        megatron_fused_ce.disable()
        off = train_two_micro_batches(model, rank)
        counters = megatron_fused_ce.counters()
        counters.reset()
        megatron_fused_ce.enable(
            megatron_fused_ce.FusedCEConfig(
                strategy=model.strategy, num_chunks=3, skip_masked=model.skip_masked
            )
        )
        on = train_two_micro_batches(model, rank)
        megatron_fused_ce.disable()
        promised = promise.counts
    assert (counters.fused, counters.materialised, counters.stock) == (2 * (1 + model.mtp), 0, 0)
    # Of each micro-batch the main loss, and no other head, was grad_in_forward, and left its masked tokens
    # out.
    makes_gradients = model.strategy == "grad_in_forward" and takes_mask(model)
    assert promised == promise.Counts(kept=2 * makes_gradients)
    # One wait of the host for each backward that has something to look at, and one more for a count.
    verdicts = [words for words in read if len(words) == 1 + 2 * model.skip_masked and not any(words)]
    assert len(verdicts) == 2 * (makes_gradients or model.skip_masked)
    kept = [words[0] for words in read if words not in verdicts]
    assert len(kept) == (2 if model.skip_masked else 0)
    assert all(0 < count < BATCH * SEQUENCE for count in kept)
    assert off.keys() == on.keys()
    assert any("gradient" in name for name in off)
    if model.mtp:
        assert any(name.startswith("MTP") for name in off)
    half = model.dtype != torch.float32
    for name, expected in off.items():
        got = on[name].double()
        expected = expected.double()
        norm = float(expected.norm())
        difference = float((got - expected).norm()) / (norm or 1.0)
        if "correct" in name or "total" in name:
            assert torch.equal(got, expected), f"{name}: {got} instead of {expected}"
            continue
        assert norm > 0 or "gradient" not in name, f"{name} is zero: the case tests nothing"
        bound = LOSS_BOUND if "loss" in name else GRADIENT_BOUND
        if half:
            bound = 2e-3 if "loss" in name else 2e-2
        assert difference <= bound, f"{name}: differs by {difference:.2e}, more than {bound:.0e}"


@on_ranks(Ranks(2, INSTALLED, needs_nccl=DDP))
def test_the_installed_core(rank: Rank):
    """One model of `make test` runs with the other megatron-core."""
    test_off_against_on.on_a_rank(rank, "gpt grad_in_forward sp")


def built_off_and_on(rank: Rank) -> tuple[Any, Any]:
    """The plain model without and with the flag, from one seed; the flag is off afterwards."""
    import megatron_fused_ce

    megatron_fused_ce.disable()
    off = build(Model(), rank)
    megatron_fused_ce.enable()
    on = build(Model(), rank)
    megatron_fused_ce.disable()
    return off, on


@on_ranks(*MODELS)
def test_checkpoint_moves_between_flag_off_and_on(rank: Rank):
    """A state dict saved with the flag on loads strictly with it off, and the other way round."""
    have_groups(rank.size)
    off, on = built_off_and_on(rank)
    assert type(on.output_layer) is not type(off.output_layer)
    assert type(on.output_layer).__name__ == type(off.output_layer).__name__
    assert list(on.state_dict()) == list(off.state_dict())
    off.load_state_dict(on.state_dict())
    on.load_state_dict(off.state_dict())
    assert sorted(on.sharded_state_dict()) == sorted(off.sharded_state_dict())


#: Megatron's low-precision settings. MXFP8 with its output projection: see the test below.
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid"},
    "tensorwise, first and last layer in bf16": {
        "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0,
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8, parameters too": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip


@contextlib.contextmanager
def low_precision_contexts(patch: pytest.MonkeyPatch, entered: list[str]) -> Iterator[list[str]]:
    """Stand-ins for Transformer Engine's contexts around layers; yields those that are open."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import multi_token_prediction, transformer_block

    open_ones: list[str] = []

    @contextlib.contextmanager
    def context(name: str, *given: Any, **named: Any) -> Iterator[None]:
        if not named.get("is_init"):
            entered.append(name)
            open_ones.append(name)
        yield
        if not named.get("is_init"):
            open_ones.pop()

    for module in (transformer_block, hybrid_block, multi_token_prediction):
        for name in ("get_fp8_context", "get_fp4_context"):
            patch.setattr(module, name, functools.partial(context, name), raising=False)
    yield open_ones


@on_ranks(*IN_DDP[:1])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_layers_in_low_precision(rank: Rank, name, family):
    """The head is Megatron's bf16 layer, outside of every FP8 and FP4 context, and fused as ever.

    Transformer Engine's contexts are stand-ins, and the layers are Megatron's local ones, in bf16.
    """
    import megatron_fused_ce
    from megatron_fused_ce.adapter import output_layer

    model = Model(family=family, mtp=1, dtype=torch.bfloat16, extra=LOW_PRECISION[name])
    have_groups(rank.size)
    entered: list[str] = []
    with pytest.MonkeyPatch.context() as patch, low_precision_contexts(patch, entered) as open_ones:
        off = train_two_micro_batches(model, rank)
        around_head = []
        evaluate = output_layer.linear_cross_entropy

        def noted(*given: Any, **named: Any) -> Any:
            around_head.append(list(open_ones))
            return evaluate(*given, **named)

        patch.setattr(output_layer, "linear_cross_entropy", noted)
        megatron_fused_ce.counters().reset()
        megatron_fused_ce.enable()
        on = train_two_micro_batches(model, rank)
        megatron_fused_ce.disable()
        counters = megatron_fused_ce.counters()
    assert set(entered) == {"get_fp4_context" if "fp4" in LOW_PRECISION[name] else "get_fp8_context"}
    assert around_head == [[]] * 4
    assert (counters.fused, counters.materialised, counters.stock) == (4, 0, 0)
    for key in ("loss of micro-batch 0", "loss of micro-batch 1"):
        torch.testing.assert_close(on[key], off[key], rtol=2e-3, atol=0)


@on_ranks(*IN_DDP[:1])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_an_output_layer_in_mxfp8(rank: Rank, family):
    """GPTModel's head is then Transformer Engine's layer (here a stand-in) and stays with Megatron, in words;
    HybridModel has no such layer. In 0.18 and newer."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    import megatron_fused_ce

    class TELMHeadColumnParallelLinear(ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:  # as Transformer Engine's, not Megatron's
            return super().forward(*args, **kwargs)

    fp8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}
    model = Model(family=family, dtype=torch.bfloat16, extra=fp8)
    have_groups(rank.size)
    megatron_fused_ce.counters().reset()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(gpt_model, "is_mxfp8_output_proj_active", lambda config: config.fp8_output_proj)
        patch.setattr(gpt_model, "TELMHeadColumnParallelLinear", TELMHeadColumnParallelLinear)
        megatron_fused_ce.enable()
        train_two_micro_batches(model, rank)
        megatron_fused_ce.disable()
        if family == "gpt":
            megatron_fused_ce.enable(megatron_fused_ce.FusedCEConfig(z_loss=1e-4))
            with pytest.raises(ValueError, match="TELMHeadColumnParallelLinear"):
                build(model, rank)
            megatron_fused_ce.disable()
    assert megatron_fused_ce.counters().fused == (0 if family == "gpt" else 2)
    if rank.rank == 0 and family == "gpt":
        assert "stays on Megatron's own path" in said.getvalue()
        assert "TELMHeadColumnParallelLinear (--fp8-output-proj)" in said.getvalue()


class SumOfSquares(torch.autograd.Function):
    """A loss ``[b, s]`` of given logits whose backward is written by hand, as Liger's is."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum(-1).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * grad.t().unsqueeze(-1)


@on_ranks(*MODELS)
def test_a_loss_of_the_models_own(rank: Rank):
    """It gets real logits, whether its class has it or this model alone."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    import megatron_fused_ce
    from megatron_fused_ce.adapter import report, stock_path

    def own_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return SumOfSquares.apply(logits)

    gradients, said = [], io.StringIO()
    have_groups(rank.size)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        megatron_fused_ce.enable()
        fused = build(Model(), rank)
        assert type(fused.output_layer) is not ColumnParallelLinear
        fused.compute_language_model_loss = functools.partial(own_loss, fused)
        assert "own_loss" in stock_path.reason_at_build(fused, None)
        patch.setattr(GPTModel, "compute_language_model_loss", own_loss, raising=False)
        report._said.clear()
        for turn in (megatron_fused_ce.enable, megatron_fused_ce.disable):
            turn()
            built = build(Model(), rank)
            assert type(built.output_layer) is ColumnParallelLinear
            forward(built, rank, True).sum().backward()
            gradients.append([parameter.grad for parameter in built.parameters()])
    assert all(map(torch.equal, *gradients))
    told = "the head of GPTModel stays on Megatron's own path: GPTModel has a loss of its own"
    assert said.getvalue().count(told) == (rank.rank == 0)


@on_ranks(*MODELS)
def test_start_up_line(rank: Rank):
    """One rank names strategy, chunks and bytes: those of tests/megatron/test_report.py."""
    import argparse

    import megatron_fused_ce
    from megatron_fused_ce.adapter import arguments, report

    sizes = argparse.Namespace(seq_length=SEQUENCE, micro_batch_size=BATCH, perform_rl_step=True)
    said = io.StringIO()
    have_groups(rank.size)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(arguments, "megatron_args", lambda: sizes)
        patch.setattr(report, "_said", set())
        config = megatron_fused_ce.FusedCEConfig("recompute", num_chunks=3, logits_backend="gemm_rows")
        megatron_fused_ce.enable(config)
        for dtype in (torch.float32, None, torch.bfloat16):
            build(Model(dtype=dtype), rank)
        build(Model(tied=True), rank)
        megatron_fused_ce.disable()
    lines = [line for line in said.getvalue().splitlines() if line.startswith("[fused-ce] on: ")]
    if rank.rank > 0:
        assert lines == []
        return
    expected = f"strategy recompute (asked for), 3 chunks of {SEQUENCE * BATCH // 3} tokens; about "
    assert len(lines) == 4
    assert all(expected in line for line in lines), (expected, lines)
    assert lines[0] == lines[1], "a YAML launch leaves params_dtype unset"
    for dtype in ("float32", "bfloat16"):  # of train_rl.py, once each
        words = f"get_logprobs makes no logits; its log-probabilities are {dtype} on every pipeline stage"
        assert said.getvalue().count(words) == 1


@on_ranks(*MODELS)
def test_options_of_the_loss(rank: Rank):
    """The loss is the definition's on Megatron's own logits; Megatron's own loss is refused."""
    import torch.distributed as dist

    import megatron_fused_ce
    from megatron_fused_ce.adapter import arguments
    from megatron_fused_ce.scripts.lib.reference import LOSS_OPTIONS, HeadInputs, plain_head

    labels = (torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCAB).roll(-1, 1)
    have_groups(rank.size)
    megatron_fused_ce.disable()
    shard = forward(build(Model(), rank), rank, False).detach().contiguous()
    shards = [torch.empty_like(shard) for _ in range(rank.size)]
    dist.all_gather(shards, shard)
    logits = torch.cat(shards, -1).transpose(0, 1)
    for options in LOSS_OPTIONS.values():
        # Hidden states that the identity makes these logits of.
        config = megatron_fused_ce.FusedCEConfig(**{**options, "ignore_index": 7})
        eye = torch.eye(VOCAB, device=rank.device)
        inputs = HeadInputs(
            logits,
            eye,
            labels.to(rank.device),
            torch.ones(BATCH, SEQUENCE, device=rank.device),
            config=config,
        )
        expected = plain_head(inputs, torch.float64).loss
        megatron_fused_ce.enable(config)
        on = build(Model(), rank)
        loss = forward(on, rank, True)
        difference = (loss - expected).abs().max()
        assert difference < 2e-5 * expected.abs().max(), (options, difference)
        assert (loss[labels.to(rank.device) == 7] == 0).all()
        on.output_layer.register_forward_hook(lambda *a: None)
        with pytest.raises(ValueError, match="Megatron's own loss knows nothing of it"):
            forward(on, rank, True)
        for training in (True, False):
            made = forward(on.train(training), rank, False)  # for inference, they are no loss
            with pytest.raises(ValueError, match=r"Megatron's own loss .* was called without labels"):
                made.sum().backward()
        on.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_fused_ce.adapter.stock_path.reason_at_build", lambda *a: "a test")
            with pytest.raises(ValueError, match=r"ignore_index.*a test"):
                build(Model(), rank)
    megatron_fused_ce.disable()
    with pytest.raises(ValueError, match="takes the vocabulary size from Megatron's tokenizer"):
        arguments.config_from_args(
            arguments.args_from_argv(["--fused-chunked-ce", "--fused-ce-mask-padded-vocab"])
        )


@on_ranks(of_core(2, NEWEST), of_core(2, INSTALLED))
@pytest.mark.parametrize("name", ACCURACY)
def test_accuracy_beside_the_loss(rank: Rank, name):
    """Against the argmax of the stock logits, in training and evaluation."""
    import megatron_fused_ce

    model = model_of(rank, name)
    have_groups(rank.size)
    megatron_fused_ce.disable()
    off = build(model, rank)
    batches, corrects = batches_half_right(off, rank)
    ignored = int(batches[0].labels[0, 0])
    for ignore_index in (None, ignored):
        config = megatron_fused_ce.FusedCEConfig(
            model.strategy,
            num_chunks=3,
            ignore_index=ignore_index,
            skip_masked=model.skip_masked,
            # What the stock logits are: in bf16 a label may tie there with what is larger in fp32.
            logit_precision="activations",
        )
        megatron_fused_ce.enable(config, log_accuracy=True)
        on = build(model, rank)
        megatron_fused_ce.disable()
        for forward_only in (False, True):
            on.train(not forward_only)
            reports = run_schedule(on, batches, rank, forward_only)
            check_accuracy(reports, batches, corrects, ignore_index)
    for reported in run_schedule(off, batches, rank, True):
        assert list(reported) == ["lm loss"]


@on_ranks(*MODELS)
def test_accuracy_that_cannot_be_had(rank: Rank):
    """At start-up it is refused; a call on the stock path leaves the key, and NaN in it."""
    import megatron_fused_ce

    have_groups(rank.size)
    with pytest.MonkeyPatch.context() as patch:
        megatron_fused_ce.disable()
        batches, _ = batches_half_right(build(Model(), rank), rank)
        megatron_fused_ce.enable(log_accuracy=True)
        on = build(Model(), rank)
        assert not run_schedule(on, batches, rank, True)[0]["lm accuracy"].isnan().any()
        hook = on.output_layer.register_forward_hook(lambda *a: None)
        for reported in run_schedule(on, batches, rank, False):
            assert reported["lm accuracy"].isnan().all() and reported["lm loss"].isfinite().all()
        hook.remove()
        if not takes_mask(Model(family="hybrid")):
            with pytest.raises(ValueError, match=r"log-accuracy.*without a loss_mask"):
                build(Model(family="hybrid"), rank)
        patch.setattr("megatron_fused_ce.adapter.accuracy.HOOK_POINT", "no_such_function")
        with pytest.raises(ValueError, match="schedules have no no_such_function"):
            build(Model(), rank)
        patch.setattr("megatron_fused_ce.adapter.stock_path.reason_at_build", lambda *a: "a test")
        with pytest.raises(ValueError, match=r"on Megatron's own path: a test\. Leave it out"):
            build(Model(), rank)
        megatron_fused_ce.disable()


@on_ranks(*MODELS)
@pytest.mark.parametrize(("mtp", "strategy"), [(0, "recompute"), (1, "grad_in_forward")])
def test_generation_and_evaluation(rank: Rank, mtp, strategy):
    """A rollout step is Megatron's; a labelled evaluation under inference mode is fused, options and all."""
    import megatron_fused_ce

    have_groups(rank.size)
    megatron_fused_ce.disable()
    model = Model(mtp=mtp)
    off = build(model, rank)
    counters = megatron_fused_ce.counters()

    def evaluation(built: Any, mask: torch.Tensor) -> torch.Tensor:
        built.eval()
        with torch.inference_mode():
            return forward(built, rank, True, loss_mask=mask)

    mask = torch.ones(BATCH, SEQUENCE, device=rank.device)
    mask[:, ::3] = 0.0
    for options in ({}, {"skip_masked": True}, {"z_loss": 1e-3}):
        megatron_fused_ce.enable(
            megatron_fused_ce.FusedCEConfig(strategy, num_chunks=3, **options), log_accuracy=True
        )
        on = build(model, rank)
        megatron_fused_ce.disable()
        counters.reset()
        # 0.16 clones the labels of its MTP heads
        can_roll_out = not mtp or core_version() >= (0, 19)
        for _ in range(2):
            if can_roll_out:
                torch.testing.assert_close(rollout(on, rank), rollout(off, rank))
            loss, expected = evaluation(on, mask), evaluation(off, mask)
            if "z_loss" not in options:
                torch.testing.assert_close(loss * mask, expected * mask)
            else:
                assert (loss > expected).all()
        # Heads of multi-token prediction are evaluated with the main one, and make no logits in a rollout.
        stock = 4 if can_roll_out else 0
        counted = (counters.fused, counters.materialised, counters.stock)
        assert counted == (2 * (1 + mtp), 0, stock), counted
        on.train()
        (forward(on, rank, True, loss_mask=mask) * mask).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in on.parameters())
        # A call without labels shows no loss: real logits, from Megatron's layer.
        counters.reset()
        with torch.inference_mode():
            if can_roll_out and not mtp:
                forward(on, rank, False)
                assert (counters.fused, counters.materialised, counters.stock) == (0, 0, 1)
