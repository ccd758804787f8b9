"""Row passes of a divergence, in Triton and in plain PyTorch, against fp64 and each other."""

from __future__ import annotations

from math import factorial, inf, log, nan

import pytest
import torch

from megatron_fused_ce.distillation import rows_torch
from megatron_fused_ce.kernels import divergence
from megatron_fused_ce.kernels.records import Side
from tests.support import distillation
from tests.support.op import DTYPES

ROWS = [pytest.param(divergence, id="triton"), pytest.param(rows_torch, id="torch")]
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.999)]


def of_every(kinds=KINDS):
    """Kinds of both; of jsd interpreted, which takes seconds a call, one beta: a GPU has them all."""
    slow = {kind for kind in kinds if kind[0] == "jsd" and kind[1] != 0.1 and not torch.cuda.is_available()}
    cases = [
        pytest.param(*rows.values, *kind, id="-".join(map(str, (rows.id, *kind))))
        for rows in ROWS
        for kind in kinds
        if not (rows.id == "triton" and kind in slow)
    ]
    return pytest.mark.parametrize(("rows", "kind", "beta"), cases)


#: A divergence's error in nats; KL(p_s || m) and gradients: of their terms' size.
FLOOR = 1e-6


def natural(side: Side, dtype=torch.float64) -> torch.Tensor:
    s = side.logits.to(dtype) * side.scale
    return s if side.softcap is None else side.softcap * torch.tanh(s / side.softcap)


def definition(student: Side, teacher: Side, kind: str, beta: float, num_classes=None, dtype=torch.float64):
    """Divergence ``[C]``; mean of log(p_s / m) less what it is where the student's logit is the largest
    ``[C]``; gradients by the scaled logits, before the softcap ``[C, V]``; the size of their terms, of which
    they may be small differences. In fp64 or as eager PyTorch has it.
    """
    log_s, log_t = (natural(side)[:, :num_classes].to(dtype).log_softmax(1) for side in (student, teacher))
    p_s = log_s.exp()
    if kind == "forward_kl":
        made, mean = distillation.expected(log_t, log_t - log_s), torch.zeros_like(log_s[:, 0])
        gradient = p_s - log_t.exp()
        size = gradient.abs().max().item()
    else:
        share = 1.0 if kind == "reverse_kl" else 1 - beta
        log_m = log_t if kind == "reverse_kl" else distillation.log_mixture(log_s, log_t, beta)
        of_student = distillation.expected(log_s, log_s - log_m)
        made = share * of_student + beta * distillation.expected(log_t, log_t - log_m)
        mean = of_student - (log_s - log_m).gather(1, log_s.argmax(1, keepdim=True))[:, 0]
        gradient = (share * p_s * (log_s - log_m - of_student[:, None])).masked_fill(p_s == 0, 0.0)
        size = share * p_s.max().item() * max(1.0, of_student.max().item())
    if student.softcap is not None:
        slope = torch.cosh(student.logits[:, :num_classes].double() * student.scale / student.softcap) ** -2
        gradient = gradient * slope
    return made, mean, gradient, size


def as_sides(student, teacher, options=({}, {}), num_classes=None) -> tuple[Side, Side]:
    """With normalizers of the first ``num_classes`` columns, from fp64; options: scale and softcap."""
    sides, tops = [], []
    for logits, of_side in zip((student, teacher), options, strict=True):
        side = Side(logits, logits, logits, **of_side)
        s = natural(side)[:, :num_classes]
        row_max, at = s.max(1, keepdim=True)
        log_sum = (s - row_max).exp().scatter(1, at, 0.0).sum(1).log1p() + 0.0 * row_max[:, 0]
        sides.append(side._replace(top=logits.gather(1, at)[:, 0].float(), log_sum=log_sum))
        tops.append(at)
    ratio = (sides[0].log_sum - sides[1].log_sum).float()
    beside = teacher.gather(1, tops[0])[:, 0].float()
    beside = torch.where(beside == -inf, sides[1].top - 88, beside)
    of_student, of_teacher = (side._replace(log_sum=side.log_sum.float()) for side in sides)
    return of_student, of_teacher._replace(log_ratio=ratio, beside=beside)


def within(made, exact, eager, floor, rounding=0.0):
    """Twice eager PyTorch's error, or the floor of the largest, and an element's own rounding."""
    error = (made.double() - exact).abs()
    bound = max(2 * (eager.double() - exact).abs().max().item(), floor)
    excess = (error - rounding * exact.abs()).max()
    assert excess <= bound, f"{excess} > {bound}"


def held(rows, student, teacher, kind, beta, num_classes=None, out_dtype=torch.float32):
    """Sums and gradients of one shard that is the whole vocabulary, in place too where the dtype is one."""
    valid = num_classes and torch.tensor([num_classes], device=student.logits.device)
    (exact, exact_mean, gradient, size), (eager, eager_mean, of_eager, _) = (
        definition(student, teacher, kind, beta, num_classes, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    # Above 1 nat relative: fp32 has no closer number for 100 nats than 4e-6.
    floor, mean_floor = (FLOOR * max(1.0, of.abs().max().item()) for of in (exact, exact_mean))
    args = student, teacher, kind, beta, valid
    sums = rows.divergence_sums(*args)
    within(sums[0], exact, eager, floor)
    within(sums[1], exact_mean, eager_mean, mean_floor)
    out = torch.empty_like(student.logits, dtype=out_dtype)
    args, kept = (*args, None if kind == "forward_kl" else sums[1]), student.logits.clone()
    beside = rows.divergence_gradients(*args, out, with_sums=True)
    within(beside, exact, eager, floor)
    floor = max(FLOOR * size, 0.5 * torch.finfo(out_dtype).smallest_normal)
    rounding = 0.0 if out_dtype == torch.float32 else torch.finfo(out_dtype).eps / 2
    if out_dtype == torch.bfloat16 and out.device.type == "cpu":
        rounding *= 2  # the interpreter cuts digits off
    within(out[:, :num_classes], gradient, of_eager, floor, rounding)
    assert num_classes is None or (out[:, num_classes:] == 0).all()
    assert torch.equal(student.logits, kept), "out of place must leave the logits alone"
    in_place = student.logits if student.logits.dtype == out_dtype else out.clone()
    assert rows.divergence_gradients(*args, in_place) is None
    torch.testing.assert_close(in_place, out, rtol=0, atol=0)
    student.logits.copy_(kept)
    return sums


def peaked(z, column):
    z = z.clone()
    z[:, column] = torch.logsumexp(z.double(), 1).float() + log(1e6)
    return z


def underflows(z, every, below):
    return torch.where(torch.arange(z.shape[1]) % every == 1, z - below, z)


def excluded(z, logit=-inf):
    """Of every fifth class."""
    return torch.where(torch.arange(z.shape[1]) % 5 == 3, logit, z)


#: Logits of a student and a teacher, of two draws.
PAIRS = {
    "apart": lambda z, noise: (z, noise),
    "related": lambda z, noise: (z, z + 0.2 * noise),
    "nearly equal": lambda z, noise: (z, z + 3e-4 * noise),
    "an offset": lambda z, noise: (z, z + 0.2 * noise + 1000.0),
    "peaked student": lambda z, noise: (peaked(z, 17), noise),
    "peaked teacher": lambda z, noise: (z, peaked(noise, -21)),
    "peaked at two classes": lambda z, noise: (peaked(z, 17), peaked(noise, -21)),
    "peaked at one class": lambda z, noise: (peaked(z, 17), peaked(noise, 17)),
    "student underflows": lambda z, noise: (underflows(z, 3, 150), noise),
    "teacher underflows": lambda z, noise: (z, underflows(noise, 3, 150)),
    "both underflow": lambda z, noise: (underflows(z, 3, 150), underflows(noise, 2, 200)),
    # Only a class that the one side has, be it of exp(-300), and the other excludes makes a KL infinite.
    "excluded on both sides": lambda z, noise: (excluded(z), excluded(noise)),
    "excluded by the student": lambda z, noise: (excluded(z), noise),
    "excluded by the teacher": lambda z, noise: (z, excluded(noise)),
    "excluded by the student, underflowing": lambda z, noise: (excluded(z), excluded(noise, -300.0)),
    "excluded by the teacher, underflowing": lambda z, noise: (excluded(z, -300.0), excluded(noise)),
}
#: Of each of them what may be infinite.
INFINITE = [("forward_kl", "excluded by the student"), ("reverse_kl", "excluded by the teacher")]


def pair(what, device, num_columns=1100, num_rows=2):
    """fp32: a whole block of FP32_BLOCK, and a part of one."""
    generator = torch.Generator().manual_seed(num_columns)
    draws = 3 * torch.randn(2, num_rows, num_columns, generator=generator)
    return [side.to(device) for side in PAIRS[what](*draws)]


FP32, BF16, FP16 = DTYPES
#: A pair with its sizes; options of the sides; dtypes of student, teacher and gradients; columns that are no
#: padding, and how many the teacher has.
CALLS = {
    **{what: {"what": what} for what in PAIRS},
    **{f"{n} columns": {"sizes": (n, 1)} for n in (1, 2, 127, 128, 4096, 4097, 9001)},
    "scales": {"options": ({"scale": 0.7}, {"scale": 1.3})},
    "a softcap": {"options": ({"scale": 0.7, "softcap": 5.0}, {})},
    "the teacher's": {"options": ({}, {"scale": 1.3, "softcap": 4.0})},
    "both": {"options": ({"scale": 0.7, "softcap": 5.0}, {"scale": 1.3, "softcap": 4.0})},
    **{  # blocks of 2048 where no side is fp32
        str(dtypes): {"sizes": (2111, 2), "dtypes": dtypes}
        for dtypes in (
            *((BF16, BF16, BF16), (BF16, FP32, FP16), (BF16, BF16, FP32), (FP16, FP16, FP16)),
            *((FP16, FP32, BF16), (FP32, FP32, BF16), (FP32, FP32, FP16), (FP16, FP16, FP32)),
        )
    },
    **{f"padding from {at}": {"padding": at} for at in ((1024, 1024), (1024, 1031), (1090, 1099))},
}


@of_every()
@pytest.mark.parametrize("call", CALLS)
def test_against_fp64(rows, kind, beta, call, device):
    """Padding of NaN and infinities is never read for a result."""
    given = {"what": "related", "sizes": (), "options": ({}, {}), "dtypes": (FP32,) * 3, "padding": None}
    what, sizes, options, (of_student, of_teacher, of_gradient), padding = (given | CALLS[call]).values()
    student, teacher = pair(what, device, *sizes)
    valid = None
    if padding is not None:
        valid, width = padding
        teacher = torch.nn.functional.pad(teacher[:, :valid], (0, width - valid), value=nan)
        student[:, valid:] = inf
    sides = as_sides(student.to(of_student), teacher.to(of_teacher), options, valid)
    if any(kind == of_kind and what.startswith(of_pair) for of_kind, of_pair in INFINITE):
        assert (rows.divergence_sums(*sides, kind, beta, None)[0] == inf).all()
    else:
        sums = held(rows, *sides, kind, beta, valid, of_gradient)
        assert of_student != FP32 or (sums[0] >= 0).all()


@of_every()
def test_a_shard_of_padding_alone(rows, kind, beta, device):
    sides, none = as_sides(*pair("related", device)), torch.tensor([0], device=device)
    assert (rows.divergence_sums(*sides, kind, beta, none) == 0).all()
    out = torch.empty_like(sides[0].logits)
    rows.divergence_gradients(*sides, kind, beta, none, sides[0].top, out)
    assert (out == 0).all()


#: Rows at temperature 5 of which a rounding of a number of the whole row, such as a normalizer, took more
#: than 2e-6: vocabulary, rows, which of them, by how much it is raised.
OF_WHOLE_ROWS = {
    ("forward_kl", "one class"): (128256, 4, 0, 8),
    ("jsd 0.9", "one class"): (512, 16, 9, 30),
    ("jsd 0.1", "two classes"): (128256, 4, 0, 100),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sides", distillation.CONFIDENT)
@pytest.mark.parametrize("kind", distillation.KINDS)
def test_confident_sides(rows, kind, sides, device, monkeypatch):
    """Over ranks: tests/parallel/test_distillation.py."""
    slow = rows is divergence and device.type == "cpu"
    if slow:  # a block takes the interpreter as long, whatever its size
        monkeypatch.setattr(divergence, "FP32_BLOCK", 2**14)
    of_kind = distillation.KINDS[kind]
    cells = [
        (512, 2, slice(None), raised, temperature)
        for temperature in ((1.0,) if slow else (0.1, 1.0, 5.0))
        for raised in ((14, 30, 100) if slow else (0, 8, 14, 20, 30, 60, 100))
    ]
    if (kind, sides) in OF_WHOLE_ROWS:
        vocab, num_rows, row, raised = OF_WHOLE_ROWS[kind, sides]
        cells.append((vocab, num_rows, slice(row, row + 1), raised, 5.0))
    for vocab, num_rows, kept, raised, temperature in cells:
        problem = distillation.confident(
            vocab, raised, sides, rows=num_rows, device=device, kind=kind, temperature=temperature
        )
        scale = {"scale": 1 / temperature}
        logits = (of.t()[kept].contiguous() for of in (problem.weight, problem.teacher[1]))
        args = *as_sides(*logits, (scale, scale)), of_kind["divergence"], of_kind.get("beta", 0.5), None
        out = torch.empty_like(args[0].logits)
        rows.divergence_gradients(*args, rows.divergence_sums(*args)[1], out)
        error = distillation.worst_row(out / temperature, distillation.exact_rows(problem)[kept])
        assert error <= 2e-6, f"temperature {temperature}, raised by {raised}: {error}"


@of_every()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_sides_give_nothing(rows, kind, beta, dtype, device):
    """To the bit, with all options, where both underflow, and where classes are excluded on both."""
    logits = pair("student underflows", device)[0].to(dtype)
    logits[:, 5::7] = -inf
    for options in ({"scale": 0.7, "softcap": 20.0}, {}):
        given, same = as_sides(logits, logits.clone(), (options, options))
        sums = rows.divergence_sums(given, same, kind, beta, None)
        assert (sums == 0).all()
        out = torch.empty_like(logits)
        beside = rows.divergence_gradients(given, same, kind, beta, None, sums[1], out, with_sums=True)
        assert (beside == 0).all() and (out == 0).all()


@of_every()
@pytest.mark.parametrize("of_teacher", [False, True])
@pytest.mark.parametrize("value", [nan, inf])
def test_nan_and_infinite_logits(rows, kind, beta, of_teacher, value, device):
    z = pair("apart", device, 300)
    z[of_teacher][1, 7] = value
    student, teacher = as_sides(*z)
    sums = rows.divergence_sums(student, teacher, kind, beta, None)
    assert sums[0].isnan().tolist() == [False, True]
    out = torch.empty_like(z[0])
    beside = rows.divergence_gradients(student, teacher, kind, beta, None, sums[1], out, with_sums=True)
    assert torch.equal(beside.isnan(), sums[0].isnan())
    assert out[1].isnan().all() and not out[0].isnan().any()


def h(x):
    series = sum(x**n / factorial(n) for n in range(2, 9))
    return torch.where(x.abs() < 1e-2, series, torch.expm1(x) - x)


@of_every([*KINDS, ("jsd", 0.01), ("jsd", 1e-4), ("jsd", 0.9999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_terms_keep_their_digits(rows, kind, beta, dtype, device):
    """Classes one by one, with probabilities of 1 and less, on both sides of each formula's border.

    Those of jsd, which a logarithm of the mixture makes, to its error.
    """
    size = torch.logspace(-5, 2, 8, dtype=torch.float64)
    near = torch.tensor([0.2499, 0.25, 0.2501])
    r = torch.cat([size, near, -size, -near]).to(dtype)[:, None].to(device)
    ones = torch.zeros(r.shape[0], device=device)
    student = Side(torch.where(r > 0, 0.0, r).to(dtype), ones, ones)
    teacher = Side(torch.where(r > 0, -r, 0.0).to(dtype), ones, ones, log_ratio=ones, beside=ones)
    s, t = student.logits[:, 0].double(), teacher.logits[:, 0].double()
    p_s, p_t, r = s.exp(), t.exp(), s - t
    if kind == "forward_kl":
        term, mean = p_t * h(r), torch.zeros_like(r)
        gradient = p_t * torch.expm1(r)
    elif kind == "reverse_kl":
        term = p_s * h(-r)
        gradient = mean = p_s * r
    else:
        x_s = torch.log1p(beta * torch.expm1(-r))
        x_t = torch.log1p((1 - beta) * torch.expm1(r))
        term = beta * p_t * h(x_t) + (1 - beta) * p_s * h(x_s)
        mean = -p_s * x_s
        gradient = (1 - beta) * mean
    sums = rows.divergence_sums(student, teacher, kind, beta, None)
    out = torch.empty_like(student.logits, dtype=torch.float32)
    beside = rows.divergence_gradients(student, teacher, kind, beta, None, ones, out, with_sums=True)
    # What two logarithms leave, of a mass of 1. 1e-36: fp32's exp ends.
    absolute = 1.5e-7 if kind == "jsd" else 1e-36
    # Of 1 - exp(-1/4) - 1/4, which is -0.029; and of exp(-90) by the hardware, 90 * 2**-24.
    relative = 4e-6 if dtype == torch.float32 else 1e-5
    for made, expected in ((sums[0], term), (beside, term), (sums[1], mean), (out[:, 0], gradient)):
        error = (made.double() - expected).abs()
        bound = relative * expected.abs() + absolute
        assert (error <= bound).all(), (error / bound).max()
