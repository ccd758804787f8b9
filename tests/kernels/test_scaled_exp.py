"""The scaled-exp GEMM: on GPUs in bf16, on a CPU by the interpreter in fp32.

Odd token counts and ragged vocabulary tiles throughout; every strategy against fp64.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_fused_ce import FusedCEConfig, fused_linear_token_outputs
from megatron_fused_ce.kernels import gemm_variants, scaled_exp, scaled_exp_rows, sizes
from megatron_fused_ce.logits import SavedChunk, Targets, choose
from megatron_fused_ce.logits.scaled_exp import ScaledExp
from megatron_fused_ce.losses.statistics import Upstream, merge_shards
from megatron_fused_ce.rl import token_log_probs
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    KINDS,
    HeadInputs,
    make_inputs,
    plain_head,
    plain_outputs,
    relative_error,
)
from tests.support import pairs
from tests.support.losses import LOSS_OPTIONS, assert_close
from tests.support.op import (
    EXP_DTYPE,
    HAS_EXP,
    ON_GPU,
    STRATEGIES,
    leaves,
    products,
    run,
    strategy_in_place,
    without_interpreter,
)

pytestmark = pytest.mark.skipif(not HAS_EXP, reason="needs Hopper or newer")

# Several tiles with ragged ends: of 128 x 256 on a GPU, of 32 x 64 under the interpreter, which takes a
# moment for each.
SIZES = dict(s=201, b=3, hidden_size=328, vocab=2056)
TOKENS, VOCABS = (1, 31, 64, 65, 129), (8, 64, 256, 264, 512)
#: What its epilogue makes, small enough for every size below.
OPTIONS = {name: LOSS_OPTIONS[name] for name in ("z-loss", "softcap", "masked padding")}
OPTIONS["all"] = {"z_loss": 1e-3, "logit_softcap": 30.0, "ignore_index": -1, "true_vocab_size": 45}
#: Vocabulary, tokens and column of :func:`head_of_outliers`; none of the sampled columns.
OUTLIERS = (520, 70, 301)
if not ON_GPU:
    SIZES = dict(s=23, b=3, hidden_size=48, vocab=140)
    TOKENS, VOCABS = (1, 31, 32, 33, 65), (8, 64, 72, 128)
    OUTLIERS = (200, 35, 77)


@pytest.fixture(params=products(), ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def product(request, monkeypatch):
    monkeypatch.setattr(gemm_variants, "gemm_for", lambda device: request.param)
    return request.param


IN_ROWS = "begin at multiples of 16 bytes"


def exp_config(strategy, **fields):
    return FusedCEConfig(strategy=strategy, logits_backend="scaled_exp", **fields)


def assert_right(result, inputs, largest):
    """As ``assert_close``; for ``largest`` logits in fp32, which this pass is not offered for, within
    the rounding of their exponents (in powers of two) to 24 bits, twice."""
    if ON_GPU or largest < 30:
        assert_close(result, inputs)
        return
    for part, true in zip(result, plain_head(inputs, torch.float64), strict=True):
        assert relative_error(part, true) < 2 * largest * 2.0**-24


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sizes(strategy, product, device):
    """Few tokens; edges of tiles, with labels in every column; fewer rows than are sampled."""
    sizes = [(num_tokens, 40, 72) for num_tokens in TOKENS] + [(vocab, 64, vocab) for vocab in VOCABS]
    for s, hidden_size, vocab in sizes:
        inputs = make_inputs(
            "plain", s=s, b=1, hidden_size=hidden_size, vocab=vocab, dtype=EXP_DTYPE, device=device
        )
        if s == vocab:
            inputs = dataclasses.replace(inputs, labels=torch.arange(vocab, device=device).view(1, -1))
        assert_close(run(inputs, exp_config(strategy)), inputs)


def test_rescaling_at_odd_sizes(device):
    x, factor = torch.randn(2051, 7, device=device).t(), torch.randn(7, device=device)
    out = scaled_exp_rows.scale_rows(x, factor, torch.empty(7, 2051, device=device))
    torch.testing.assert_close(out, x * factor[:, None])
    x, total = x.contiguous(), x.contiguous()
    scaled_exp_rows.add_scaled_(total, out, factor[3], torch.zeros(1, dtype=torch.int64, device=device))
    torch.testing.assert_close(total, x + factor[3] * out)
    copy = scaled_exp_rows.scaled_copy(x, factor[3], torch.bfloat16)
    torch.testing.assert_close(copy, (factor[3] * x).bfloat16())


@pairs.parametrize({"option": ("plain", *OPTIONS), "kind": KINDS, "strategy": STRATEGIES})
def test_against_fp64(option, kind, strategy, product, device):
    inputs = make_inputs(kind, dtype=EXP_DTYPE, device=device, **SIZES)
    options = OPTIONS.get(option, {})
    with strategy_in_place(strategy) as strategy:
        config = exp_config(strategy, num_chunks=2, **options)
        inputs = dataclasses.replace(inputs, config=config)
        result = run(inputs, config)
    # fp32 exponents of large logits, see assert_right; a softcap of 30 leaves none.
    largest = 300.0 if kind == "wide" and "logit_softcap" not in options else 1.0
    assert_right(result, inputs, largest)


#: What the scaled-exp GEMM can round to here: the interpreter gets products of bf16 wrong.
HALF = torch.bfloat16 if ON_GPU else torch.float16


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", ["plain", *OPTIONS])
def test_logits_rounded_on_purpose(option, strategy, product, device):
    """Products are exact in fp32, so that every logit is rounded as the definition's."""
    options = OPTIONS.get(option, {})
    s, hidden_size, vocab = 35, 32, 72
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randint(-64, 65, (rows, hidden_size), generator=generator).to(device, HALF) / 64
        for rows in (s, vocab)
    )
    inputs = make_inputs("plain", s=s, b=1, hidden_size=8, vocab=45, dtype=HALF, device=device)
    inputs = dataclasses.replace(inputs, hidden=hidden.unsqueeze(1), weight=weight)
    config = exp_config(strategy, num_chunks=2, logit_precision="activations", logit_scale=0.75, **options)
    result = run(inputs, config)

    def defined(change):
        """Loss and gradients in fp64, with ``change`` done to the products."""
        z = hidden.double() @ weight.double().t()
        z = change(z).requires_grad_()
        of_logits = torch.eye(vocab, dtype=torch.float64, device=device)
        logits = dataclasses.replace(
            inputs, hidden=z.unsqueeze(1), weight=of_logits, config=config, logit_scale=0.75
        )
        loss, grad_logits, _ = plain_head(logits, torch.float64)
        return loss, grad_logits @ weight.double(), grad_logits[:, 0].t() @ hidden.double()

    exact = defined(lambda z: z.to(HALF).double())
    assert relative_error(result.loss, exact[0]) < 1e-6
    assert relative_error(defined(lambda z: z)[0], exact[0]) > 1e-5, "rounding changes nothing"
    for got, true in zip(result[1:], exact[1:], strict=True):
        assert relative_error(got, true) < FLOOR[HALF]
    with torch.no_grad():
        made = fused_linear_token_outputs(
            inputs.hidden, weight, inputs.labels, ("entropy", "predicted"), config=config
        )
    z = 0.75 * (hidden.double() @ weight.double().t()).to(HALF)[:, : config.true_vocab_size].double()
    if config.logit_softcap is not None:
        z = config.logit_softcap * torch.tanh(z / config.logit_softcap)
    log_p = z.log_softmax(-1)
    assert relative_error(made.entropy[0], -(log_p.exp() * log_p).sum(-1)) < 1e-6
    assert torch.equal(z.gather(-1, made.predicted[0][:, None])[:, 0], z.amax(-1))


@pytest.mark.parametrize(
    ("options", "kind", "strategy"),
    [
        ({}, "plain", "store"),
        ({}, "peaked", "recompute"),
        (OPTIONS["softcap"], "odd-labels", "store"),
        (OPTIONS["masked padding"], "peaked", "store"),
        (OPTIONS["all"], "plain", "recompute"),
    ],
)
def test_a_temperature_per_token(options, kind, strategy, product, device):
    """From 1/64, whose tiles are exponentiated against their own maximum, to 64."""
    inputs = make_inputs(kind, dtype=EXP_DTYPE, device=device, **SIZES)
    temperature = torch.exp2(torch.linspace(-6, 6, inputs.labels.numel(), device=device))
    options = {name: value for name, value in options.items() if name not in ("z_loss", "ignore_index")}
    config = exp_config(strategy, num_chunks=2, logit_scale=0.75, **options)
    more = {"config": config, "logit_scale": 0.75, "temperature": temperature.view(inputs.labels.shape)}
    inputs, (hidden, weight) = dataclasses.replace(inputs, **more), leaves(inputs)
    options = {"temperature": inputs.temperature, "entropy": "detached", "config": config}
    made = token_log_probs(hidden, weight, inputs.labels, **options)
    made.log_prob.backward(inputs.grad_loss)
    (exact, *true), (eager, *rough) = (
        plain_outputs(inputs, {"log_prob": inputs.grad_loss}, dtype) for dtype in (torch.float64, EXP_DTYPE)
    )
    # In fp32 see assert_right.
    floor = FLOOR[EXP_DTYPE] if ON_GPU else 2 * float(eager.lse.abs().max()) * 2.0**-24
    for got, right, plain in zip(
        (made.log_prob.detach(), made.entropy, hidden.grad, weight.grad),
        (exact.log_prob, exact.entropy, *true),
        (eager.log_prob, eager.entropy, *rough),
        strict=True,
    ):
        assert relative_error(got, right) < max(2 * relative_error(plain, right), floor, FLOOR[EXP_DTYPE])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("distance", [0.0, -3.0, 1e-3])
def test_where_a_z_loss_turns_the_gradient_around(distance, strategy, product, device):
    """At lse = -1 / (2 z) the factor of the softmax is 0, below it negative: the label's entry stays."""
    inputs = make_inputs("plain", dtype=torch.float32, device=device, **SIZES)
    hidden, weight = inputs.hidden.clone(), inputs.weight.clone()
    hidden[..., 0], weight[:, 0] = 1.0, 0.0
    lse = (hidden.double() @ weight.double().t()).logsumexp(-1)
    weight[:, 0] = (-4.0 + distance - lse.mean()).float()
    config = exp_config(strategy, num_chunks=2, z_loss=0.125)
    operands = {"hidden": hidden.to(EXP_DTYPE), "weight": weight.to(EXP_DTYPE)}
    inputs = dataclasses.replace(inputs, **operands, config=config)
    assert_close(run(inputs, config), inputs)


def head_of_outliers(device, outlier, *, at_label):
    """Logits of 0 but one of ``outlier`` a row: at the label, or beside it in another tile."""
    vocab, tokens, column = OUTLIERS
    hidden, weight = torch.zeros(tokens, 1, 16), torch.zeros(vocab, 16)
    hidden[..., 0] = 1.0
    weight[column, 0] = outlier
    labels = torch.full((1, tokens), column if at_label else 5)
    return hidden.to(device, EXP_DTYPE), weight.to(device, EXP_DTYPE), labels.to(device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gap", [15.0, 28.0, 33.0, 60.0])
def test_confident_tokens_keep_loss_and_gradient(gap, strategy, product, device):
    """1 - p from 1e-4 to 5e-24: nothing is subtracted from 1 on the way."""
    hidden, weight, labels = head_of_outliers(device, gap, at_label=True)
    vocab, tokens, column = OUTLIERS
    ones = torch.ones(labels.shape, device=device)
    loss, _, grad_weight = run(HeadInputs(hidden, weight, labels, ones), exp_config(strategy))
    miss = (vocab - 1) * math.exp(-gap)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log1p(miss)), rtol=1e-4, atol=0)
    got = grad_weight[column, 0].item()
    assert got == pytest.approx(-tokens * miss / (1 + miss), rel=1e-2 if ON_GPU else 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("outlier", [40.0, 60.0, 100.0, 300.0])
def test_a_tile_far_above_the_reference(outlier, strategy, product, device):
    """The sample misses the outlier: its tile is exponentiated against its own maximum, and the other
    tiles of the row are brought into its unit afterwards."""
    hidden, weight, labels = head_of_outliers(device, outlier, at_label=False)
    vocab, tokens, column = OUTLIERS
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    weight = weight + 0.25 * noise.to(device, EXP_DTYPE)
    weight[column] = 0
    weight[column, 0] = outlier
    inputs = make_inputs("plain", s=tokens, b=1, hidden_size=16, vocab=vocab, dtype=EXP_DTYPE, device=device)
    inputs = dataclasses.replace(inputs, hidden=hidden, weight=weight, labels=labels)
    assert_right(run(inputs, exp_config(strategy)), inputs, largest=outlier)


@pytest.mark.parametrize("below_their_own_shift", [False, True])
def test_entropy_of_tiles_that_differ_in_their_shift(below_their_own_shift, product, device):
    """Outliers that the sample misses, in tiles of one slot (64 tiles apart) and of another one.

    Or a tile full of them, just below what is exponentiated against its own maximum.
    """
    tile = 256 if ON_GPU else scaled_exp.INTERPRETER_TILING.block_n
    vocab, tokens = 66 * tile, 3
    noise = torch.randn(vocab, 16, generator=torch.Generator().manual_seed(2))
    weight = (0.25 * noise).to(device, EXP_DTYPE)
    outliers = ((tile + 1, 99.5), (2 * tile + 1, 100.0), (65 * tile + 1, 99.0))
    if below_their_own_shift:
        sampled = range(0, vocab, vocab // sizes.SAMPLED_ROWS)
        outliers = tuple((column, 46.0) for column in range(tile, 2 * tile) if column not in sampled)
    for column, logit in outliers:
        weight[column] = 0
        weight[column, 0] = logit
    hidden = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(3)).to(device, EXP_DTYPE)
    hidden[:, 0] = 1.0
    labels = torch.tensor([5, tile + 1, -1], device=device)
    with torch.no_grad():
        made = fused_linear_token_outputs(hidden, weight, labels, ("entropy",), config=exp_config("auto"))
    log_p = (hidden.double() @ weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(made.entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [-600.0, -90.0, -50.0, 50.0, 90.0, 600.0])
def test_shards_far_apart(gap, product, device):
    """A vocabulary in two halves ``gap`` nats apart, labels on either: by hand, without ranks."""
    vocab, tokens = (512, 70) if ON_GPU else (144, 35)
    inputs = make_inputs("plain", s=tokens, b=1, hidden_size=32, vocab=vocab, dtype=EXP_DTYPE, device=device)
    hidden, labels, half = inputs.hidden.flatten(0, 1), inputs.labels[0], vocab // 2
    hidden[:, 0] = 1.0
    inputs.weight[:half, 0], inputs.weight[half:, 0] = gap / 2, -gap / 2
    shards, passes = inputs.weight.split(half), ScaledExp(gemm=product)
    sample = torch.cat([scaled_exp_rows.sample_rows(shard, sizes.SAMPLED_ROWS // 2) for shard in shards])
    targets = [Targets(labels), Targets(labels - half)]
    kept = [hidden.new_empty(tokens, half) for _ in shards]
    scores = [
        passes.logits_gemm(hidden, shard, of, sample, room)
        for shard, of, room in zip(shards, targets, kept, strict=True)
    ]
    merged = merge_shards(torch.stack([score.stats.shard for score in scores]))
    z = hidden.double() @ inputs.weight.double().t()
    assert relative_error(merged.loss, F.cross_entropy(z, labels, reduction="none")) < 1e-5
    expected = z.softmax(-1) - F.one_hot(labels, vocab)
    upstream, grad_hidden, units = Upstream(torch.ones(tokens, device=device)), 0, []
    for shard, of, room, score, true in zip(
        shards, targets, kept, scores, expected.split(half, 1), strict=True
    ):
        units.append(passes.finalize(room, of, score, merged))
        saved = SavedChunk(None, room, units[-1], merged.stats)
        grad = passes.grad_from_saved(saved, of, upstream, None)
        part = grad.matrix.double() * grad.row_scale.double()[:, None]
        room = torch.empty_like(room)
        again = passes.grad_recomputed(hidden, shard, of, merged.stats, upstream, room, room)
        for got in (part, again.matrix.double()):
            assert (got - true).norm() < 4e-3 * max(true.norm(), 1e-30)
        grad_hidden = grad_hidden + part @ shard.double()
    assert relative_error(grad_hidden, expected @ inputs.weight.double()) < 4e-3
    assert torch.equal(*units), "grad_hidden is reduced before its rows are multiplied by their unit"


def test_argmax_of_ties_outliers_and_labels(product, device):
    """The lowest column of the largest logit, whether or not it is the label's."""
    hidden, weight, _ = head_of_outliers(device, 7.0, at_label=False)
    vocab, tokens, column = OUTLIERS
    weight[vocab - 6, 0] = weight[column + 1, 0] = 7.0  # a tie in another tile, and one in the same
    position = torch.arange(tokens, device=device)

    def predicted(labels):
        given = hidden, weight, labels.unsqueeze(0), ("predicted",)
        return fused_linear_token_outputs(*given, config=exp_config("auto")).predicted[0]

    # A label that ties with the rest wins: its logit was taken apart from them.
    labels = position % 4 + column - 1
    assert torch.equal(predicted(labels), torch.where(labels == column + 1, column + 1, column))
    # A label that is the largest by itself is nowhere in the tiles' maxima.
    weight[40, 0] = 9.0
    assert (predicted(torch.where(position % 2 == 0, 40, 7)) == 40).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_hidden_states_give_nan(bad, options, strategy, product, device):
    inputs = make_inputs("plain", s=4, b=1, hidden_size=8, vocab=64, dtype=EXP_DTYPE, device=device)
    inputs.hidden[2, 0, 3] = bad
    loss = run(inputs, exp_config(strategy, num_chunks=2, **options)).loss
    # A bent infinity is finite.
    lost = math.isnan(bad) or "logit_softcap" not in options
    assert torch.isnan(loss[0]).tolist() == [False, False, lost, False]


#: Reason, options, and what is done to operands ``[4, 48]`` and ``[336, 48]``.
WHY_NOT = [
    ("multiple of 16 bytes, V is 331", {}, lambda hidden, weight: (hidden, weight[:331])),
    ("multiple of 16 bytes, H is 47", {}, lambda *both: [x[:, :47].contiguous() for x in both]),
    ("logit_scale above 0", {"logit_scale": -1.0}, lambda *both: both),
    # Rows of every second column; rows that begin between multiples of 16 bytes.
    (IN_ROWS, {}, lambda hidden, weight: (hidden, weight.repeat_interleave(2, dim=1)[:, ::2])),
    (IN_ROWS, {}, lambda hidden, weight: (hidden, F.pad(weight, (1, 15))[:, 1:49])),
    # The interpreter takes any dtype, and gets products of bf16 wrong.
    *([("float64", {}, lambda *both: [x.double() for x in both])] if ON_GPU else []),
    *([] if ON_GPU else [("CUDA devices, not on cpu", {}, lambda *both: [x.bfloat16() for x in both])]),
]


@pytest.mark.parametrize(("words", "options", "change"), WHY_NOT)
def test_why_not_is_said_and_auto_takes_the_rows(words, options, change, device):
    operands = change(*(torch.ones(rows, 48, dtype=EXP_DTYPE, device=device) for rows in (4, 336)))
    if words == IN_ROWS:  # a copy can be loaded
        assert words in choose.why_not_here(exp_config("auto"), *operands)
        return
    with pytest.raises(ValueError, match=words):
        choose.choose(exp_config("auto", **options), *operands)
    chosen, reason = choose.choose(FusedCEConfig(**options), *operands)
    assert chosen.name == "gemm_rows" and reason


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_auto_takes_it_where_it_was_measured(capability, monkeypatch):
    """On compute capability 9.0. By name on any chip with TMA; the reason says how."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gemm_variants, "triton_lacks", lambda: "")
    monkeypatch.setattr(gemm_variants, "gemm_for", lambda device: scaled_exp)
    hidden = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)

    def why_not(backend):
        config = FusedCEConfig(logits_backend=backend)
        return choose.why_not_here(config, hidden, torch.zeros(64, 32, dtype=torch.bfloat16))

    assert bool(why_not("scaled_exp")) == (capability < (9, 0))
    assert why_not("gemm_rows") == "gemm_rows was asked for"
    if capability > (9, 0):
        words = "sm_{}{}".format(*capability), "(logits_backend='scaled_exp') tries it: please report"
        assert all(word in why_not("auto") for word in words)
    else:
        assert why_not("auto") == why_not("scaled_exp")


@pytest.mark.parametrize("number", [2, pytest.param(12, marks=pytest.mark.rest)])
def test_hopper_form_compiles_without_a_gpu(number):
    """For sm_90 by the installed triton, whose Gluon is experimental: its names move."""
    done = without_interpreter("compile_hopper.py", str(number))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("bytes of shared memory") == number


class BrokenProduct:
    """A form whose kernel the compiler refuses, in lines as triton's."""

    __name__ = "megatron_fused_ce.kernels.scaled_exp_broken"

    def __init__(self):
        self.tried = 0

    def scaled_exp_gemm(self, *args):
        self.tried += 1
        raise RuntimeError("at 3:7:\n  x = gl.load(p)\n      ^\nunexpected layout")


@pytest.fixture
def forms_to_try(monkeypatch):
    def take(*modules):
        monkeypatch.setattr(gemm_variants, "_candidates", lambda device: modules)
        gemm_variants.compiled.cache_clear()

    yield take
    gemm_variants.compiled.cache_clear()


def test_a_form_that_does_not_compile_leaves_the_next(forms_to_try, device):
    """Once, at the first choice, with a line; the step is run by the form that compiles."""
    broken = BrokenProduct()
    forms_to_try(broken, scaled_exp)
    inputs = make_inputs("plain", dtype=EXP_DTYPE, device=device, **SIZES)
    with pytest.warns(RuntimeWarning, match=r"scaled_exp_broken does not compile.*unexpected lay"):
        assert_close(run(inputs, exp_config("store")), inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not compile")
        assert_close(run(inputs, exp_config("store")), inputs)
    assert broken.tried == 1


def test_no_form_that_compiles_is_a_reason_for_the_rows(forms_to_try, device):
    forms_to_try(BrokenProduct())
    x = torch.zeros(8, 32, device=device, dtype=EXP_DTYPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the reason is what is told
        reason = choose.why_not_here(exp_config("store"), x, x)
    assert "scaled_exp_broken does not compile here (RuntimeError: unexpected layout)" in reason
    with pytest.raises(ValueError, match="scaled_exp_broken does not compile"):
        choose.choose(exp_config("store"), x, x)
    chosen, why = choose.choose(FusedCEConfig(), x, x)
    assert chosen.name == "gemm_rows" and (why == reason or not ON_GPU)


def test_memory_that_is_full_decides_nothing(forms_to_try, device, monkeypatch):
    """Out of memory in the trial is the caller's error, and the next call tries again."""
    forms_to_try(scaled_exp)

    def full(*args):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(scaled_exp, "scaled_exp_gemm", full)
        with pytest.raises(torch.OutOfMemoryError):
            gemm_variants.gemm_for(torch.device(device))
    assert gemm_variants.gemm_for(torch.device(device)) is scaled_exp
