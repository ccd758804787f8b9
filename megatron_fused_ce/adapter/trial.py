"""One trial of a function of a Megatron that is newer than :mod:`.known_forms`: does it compute what it did?

On small random numbers, on every rank of the group at the same point, when a model is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.adapter import forms
from megatron_fused_ce.adapter.forms import Form
from megatron_fused_ce.ranks.collectives import InStep

#: Sequence, batch, rows of a rank's part of the vocabulary in a trial of the layer, hidden size.
_SEQUENCE, _BATCH, _ROWS, _HIDDEN = 8, 3, 24, 16
#: The same in a trial of a loss: those of the head, up to so many.
_MOST_ROWS = 8192
#: Largest error of an fp32 loss and gradient, relative above 1; of a gradient rounded to bf16, relative.
_ROUNDING, _OF_BF16 = 2.0**-18, 2.0**-8
_TE = "megatron.core.extensions.transformer_engine"


def why_not_equal(newer: list[Form], loss: Callable[..., Any], model: Any, in_step: InStep) -> str:
    """Why the functions are not taken for the known ones; empty if they are, the same on every rank.

    Args:
        newer: those without a known form, by which ``model``'s head would compute its loss.
        loss: Megatron's ``compute_language_model_loss``.

    Collectives: the loss's, guarded by ``in_step``.
    """
    layer, group = model.output_layer, getattr(model.output_layer, "tp_group", None)

    def step() -> None:
        for form in newer:
            _refuse_new_names(form)
        with _apart() as device:
            if any(forms.is_of_layer(form.key) for form in newer):
                _try_layer(layer, device)
            if not all(forms.is_of_layer(form.key) for form in newer):
                _try_loss(loss, model, group, device)

    return _words(in_step.run(step))


def why_no_log_softmax(form: Form, function: Callable[..., Any], group: Any) -> str:
    """The same of ``selective_log_softmax(logits, index)``, which communicates nothing itself."""

    def step() -> None:
        _refuse_new_names(form)
        with _apart() as device:
            generator = torch.Generator("cpu").manual_seed(1)
            logits = torch.randn(_BATCH, _SEQUENCE, _ROWS, generator=generator, device="cpu").bfloat16()
            index = torch.randint(0, _ROWS, (_BATCH, _SEQUENCE), generator=generator, device="cpu")
            upstream = torch.randn(_BATCH, _SEQUENCE, generator=generator, device="cpu")

            def plain(x: Tensor) -> Tensor:
                return x.log_softmax(-1).gather(-1, index[..., None])[..., 0]

            expected = _gradient(plain, logits.double(), upstream)
            for dtype, bound in ((torch.float32, _ROUNDING), (torch.bfloat16, 8 * _OF_BF16)):
                given = logits.to(device, dtype)
                made = _gradient(lambda x: function(x, index.to(device)), given, upstream.to(device))
                _compare(made, expected, (dtype, bound), bound)

    return _words(InStep(group).run(step))


def _words(error: Exception | None) -> str:
    return (
        "" if error is None else f"{error}" if type(error) is _Unequal else f"{type(error).__name__}: {error}"
    )


class _Unequal(Exception):
    """A function is another one."""


def _refuse_new_names(form: Form) -> None:
    new = forms.new_names(form)
    if new:
        raise _Unequal(f"it reads {', '.join(sorted(new))}, as none that is known")


@contextmanager
def _apart() -> Iterator[torch.device]:
    """Eagerly, with gradients, the random states afterwards as before; the device of collectives.

    Raises:
        _Unequal: a CUDA graph is captured.
    """
    on_gpu = torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda  # not so in a CPU's stand-in
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise _Unequal("no trial while a CUDA graph is captured")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with (
        torch.random.fork_rng([device] if on_gpu else []),
        torch.compiler.set_stance("force_eager"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device(device),
    ):
        yield device


def _gradient(function: Callable[[Tensor], Any], given: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """What a function makes of a copy, and its gradient."""
    leaf = given.detach().clone().requires_grad_()
    made = function(leaf.clone())  # which may be changed in place
    if not isinstance(made, Tensor) or made.shape != upstream.shape:
        raise _Unequal("it gives no tensor of the labels' shape")
    made.backward(upstream.to(made.dtype))
    assert leaf.grad is not None
    return made.detach(), leaf.grad


def _compare(
    made: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    of_values: tuple[torch.dtype, float],
    of_gradient: float,
) -> None:
    dtype, bound_of_values = of_values
    if made[0].dtype != dtype:
        raise _Unequal(f"it gives {made[0].dtype} on a trial, not {dtype}")
    for what, ours, theirs, bound in zip(
        ("values", "gradient"), made, expected, (bound_of_values, of_gradient), strict=True
    ):
        ours, theirs = ours.cpu().double(), theirs.cpu().double()
        error = ((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max().item()
        if not error <= bound:  # NaN too
            raise _Unequal(f"its {what} differ by {error:.1e} on a trial")


def _try_loss(loss: Callable[..., Any], model: Any, group: Any, device: torch.device) -> None:
    num_ranks = 1 if group is None else group.size()
    num_rows = min(model.output_layer.output_size_per_partition, _MOST_ROWS)
    start = 0 if group is None else group.rank() * num_rows
    config = model.config
    kind = config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else ""
    generator = torch.Generator("cpu").manual_seed(1)
    shape = (_SEQUENCE, _BATCH, num_ranks * num_rows)
    logits = torch.randn(shape, generator=generator, device="cpu").mul(2)
    logits[_SEQUENCE // 2 :] *= 30.0  # a clip of logits, say, is seen there alone
    logits = logits.bfloat16().float()
    labels = torch.randint(0, shape[-1], (_BATCH, _SEQUENCE), generator=generator, device="cpu")
    upstream = torch.randn(_BATCH, _SEQUENCE, generator=generator, device="cpu")
    labels[0, 0] = labels[1, -1] = -100
    if kind != "te":  # whose loss of these two is not defined
        labels[0, 1], labels[2, 3] = -1, shape[-1]
    mine = slice(start, start + num_rows)
    given, by = labels.to(device), upstream.to(device)
    of_te: Any = getattr(sys.modules.get(_TE), "te_parallel_cross_entropy", None)
    whole = _gradient(lambda x: _plain(x, labels), logits.double(), upstream)
    expected = whole[0], whole[1][..., mine]
    for dtype in (torch.float32, torch.bfloat16):
        part = logits[..., mine].to(device, dtype).contiguous()
        made = _gradient(lambda x: loss(model, given.clone(), x), part, by)
        if kind == "te":
            expected = _gradient(lambda x: of_te(x, given.t().contiguous(), group).t(), part, by)
        rounds = dtype == torch.bfloat16 or kind == "native"
        of_gradient = _OF_BF16 * float(upstream.abs().max()) if rounds else _ROUNDING
        _compare(made, expected, (torch.float32, _ROUNDING), of_gradient)


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    """Megatron's cross entropy ``[b, s]`` of ``[s, b, V]``; a label outside has the largest logit's column,
    without a gradient."""
    outside = (labels < 0) | (labels >= logits.shape[-1])
    of_label = logits.transpose(0, 1).gather(-1, labels.masked_fill(outside, 0)[..., None])[..., 0]
    largest = logits.detach().amax(-1).t()
    return logits.logsumexp(-1).t() - torch.where(outside, largest, of_label)


def _try_layer(layer: Any, device: torch.device) -> None:
    """Its product of this rank's part, without collectives, on small whole numbers, where all is exact."""
    kind: Any = type(layer)
    tried = kind.__new__(kind)
    vars(tried).update(vars(layer))
    vars(tried).update(
        input_size=_HIDDEN, output_size=_ROWS, output_size_per_partition=_ROWS, sequence_parallel=False,
        allreduce_dgrad=False, disable_grad_reduce=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    generator = torch.Generator("cpu").manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator, device="cpu").float().to(device)

    hidden, weight = numbers(_SEQUENCE, _BATCH, _HIDDEN), numbers(_ROWS, _HIDDEN)
    upstream = numbers(_SEQUENCE, _BATCH, _ROWS)
    made = []
    for trains in (True, False):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trains)
        logits, bias = tried.forward(x, weight=w)
        if bias is not None:
            raise _Unequal("its layer gives a bias")
        logits.backward(upstream)
        made += [logits, x.grad, w.grad if trains else None]
    expected = [
        hidden @ weight.t(), upstream @ weight, upstream.flatten(0, 1).t() @ hidden.flatten(0, 1),
    ]  # fmt: skip
    for ours, theirs in zip(made, [*expected, *expected[:2], None], strict=True):
        same = ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
        if not same:
            raise _Unequal("its layer's product or a gradient of it is another on a trial")
