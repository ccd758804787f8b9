"""Checks of one call's arguments, before anything runs. Errors say: expected, got, what to do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.head.agree import must_agree
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.losses.terms import Term
from megatron_fused_ce.ranks.collectives import VocabParallel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(call: Call, comm: VocabParallel) -> None:
    """Check what this rank was called with, by itself.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if call.caller_error is not None:
        raise call.caller_error
    _check_tensors(
        call.hidden,
        call.weight,
        call.labels,
        call.token_weights,
        call.vocab_start,
        comm.num_parts,
        comm.size,
    )
    _check_requested(
        call.config,
        call.weight,
        comm.size,
        call.outputs,
        dict(call.terms),
        call.other_targets.outputs,
    )
    _check_temperature(call.temperature, call.labels)
    call.other_targets.check(call, comm.size)
    if comm.sequence_parallel and not call.reduce_grad_hidden:
        raise ValueError(
            "sequence_parallel=True gives every rank the gradient of its own tokens, summed over the "
            "ranks; reduce_grad_hidden=False is for hidden states that the caller has gathered"
        )
    needs_grad = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    if call.config.strategy == "grad_in_forward" and call.token_weights is None and needs_grad:
        raise ValueError(
            "strategy 'grad_in_forward' makes the gradients in the forward and needs token_weights, the "
            "weights that the loss will be multiplied by; give them, or use 'store' or 'recompute'"
        )
    must_agree(call)  # over one rank, too, where nothing is compared


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    vocab_start: int | None,
    num_parts: int,
    tp_size: int,
) -> None:
    """Check shapes, dtypes and devices of one call.

    Raises:
        TypeError: an argument is not a tensor, or a dtype does not fit.
        ValueError: a shape, a device or ``vocab_start`` does not fit.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if hasattr(tensor, "placements"):  # a DTensor; its class would have to be imported
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, placed {tensor.placements}; expected this rank's "
                "plain tensor: call inside the forward of the module that FSDP2 gathers it for, or pass "
                "full_tensor(), or to_local() of tensor-parallel rows"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise TypeError(
                f"{name} comes from torch.func (grad, jvp, vmap), which the fused head does not support: "
                "take torch.autograd.grad, and a loop for vmap"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, which has no numbers; give it memory first")
    _check_types(hidden, weight, labels, token_weights)
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected [V, H], this rank's vocabulary rows, "
            "with at least one row"
        )
    if hidden.dim() not in (2, 3):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}; expected [s, b, H] or [T, H]"
            + (" (this rank's part of s or T)" if num_parts > 1 else "")
        )
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has H = {hidden.shape[-1]} and weight H = {weight.shape[1]}; "
            "expected the same hidden size: hidden [s, b, H], weight [V, H]"
        )
    expected: tuple[int, ...] = (hidden.shape[0] * num_parts,)
    if hidden.dim() == 3:
        expected = (hidden.shape[1], *expected)
    if tuple(labels.shape) != expected:
        raise ValueError(_wrong_shapes(tuple(hidden.shape), tuple(labels.shape), expected, num_parts))
    is_tensor = isinstance(token_weights, Tensor)
    if token_weights is not None and not (is_tensor and token_weights.shape == labels.shape):
        came = getattr(token_weights, "shape", token_weights)
        raise ValueError(f"token_weights are {came}; expected a tensor of the labels' shape {expected}")
    if vocab_start is not None and (
        isinstance(vocab_start, bool) or not isinstance(vocab_start, int) or vocab_start < 0
    ):
        raise ValueError(
            f"vocab_start is {vocab_start!r}; expected the first global id of this rank's rows "
            "(0 or more), or None to find it"
        )
    if vocab_start and tp_size == 1:
        raise ValueError(
            f"vocab_start is {vocab_start} without a tensor-parallel group of several ranks: this rank has "
            "the whole vocabulary, from id 0 on; pass tp_group, or leave vocab_start out"
        )


def _check_types(hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor | None) -> None:
    """Dtypes and devices."""
    if hidden.dtype not in DTYPES:
        raise TypeError(
            f"hidden has dtype {hidden.dtype}; expected float32, bfloat16 or float16: cast it first"
        )
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight has dtype {weight.dtype} and hidden {hidden.dtype}; expected one dtype: "
            "cast one of them, or run under torch.autocast"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels have dtype {labels.dtype}; expected int64 (or int32) token ids")
    devices = {"hidden": hidden.device, "weight": weight.device, "labels": labels.device}
    if isinstance(token_weights, Tensor):
        devices["token_weights"] = token_weights.device
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{listed}; expected all on one device")


def _wrong_shapes(
    hidden: tuple[int, ...], labels: tuple[int, ...], expected: tuple[int, ...], num_parts: int
) -> str:
    """The error text if the labels' shape does not fit that of ``hidden``."""
    if len(labels) != len(expected):
        return (
            f"hidden has shape {hidden} and labels {labels}; expected hidden [s, b, H] with labels [b, s], "
            "or [T, H] with [T]"
        )
    tokens_first = (*reversed(labels),)  # [s, b] or [T]
    whole = (hidden[0], *expected[:-1])
    if len(hidden) == 3 and labels == (hidden[0], hidden[1] * num_parts):
        return (
            f"hidden has shape {hidden} and labels {labels}: one of them is transposed; expected hidden "
            "[s, b, H] with labels [b, s]"
        )
    if num_parts > 1 and tokens_first == whole:
        return (
            f"hidden has shape {hidden}, all tokens of labels {labels}; expected this rank's part of them, "
            f"one of {num_parts}, or sequence_parallel=False"
        )
    words = "[b, s]" if len(hidden) == 3 else "[T]"
    return f"labels have shape {labels}; expected {words} = {expected} for hidden {hidden}" + (
        f" on each of {num_parts} sequence-parallel ranks" if num_parts > 1 else ""
    )


#: The ranks exchange ids as fp32, which is exact up to 2**24.
LARGEST_ID = 2**24


def _check_requested(
    config: FusedCEConfig,
    weight: Tensor,
    tp_size: int,
    outputs: tuple[str, ...],
    terms: Mapping[str, Term],
    made_elsewhere: tuple[str, ...] = (),
) -> None:
    """Check the requested outputs of a call; ``made_elsewhere``: :attr:`.call.OtherTargets.outputs`.

    Raises:
        ValueError: an unknown or impossible output.
    """
    known = {**OUTPUTS, **terms}
    for name in outputs:
        if name not in known and name not in made_elsewhere:
            raise ValueError(f"no such output: {name!r}; choose of {', '.join(OUTPUTS)}")
    if len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs are {outputs}; name each once")
    with_ids = any("best" in known[name].needs for name in outputs if name in known)
    if with_ids and weight.shape[0] * tp_size > LARGEST_ID:
        raise ValueError(
            f"predicted ids are exact below {LARGEST_ID}; {weight.shape[0]} rows on each of {tp_size} "
            "ranks are more"
        )


def _check_temperature(temperature: float | Tensor, labels: Tensor) -> None:
    """Check a number, or a tensor's dtype and shape; the op checks a tensor's values.

    Raises:
        TypeError: neither a number nor a tensor of floats.
        ValueError: a number that is not above 0 and finite, a tensor of a wrong shape or device.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float, Tensor)):
        raise TypeError(
            f"temperature is {temperature!r}; expected a number, or a tensor in the labels' shape"
        )
    if not isinstance(temperature, Tensor):
        if not 2.0**-126 <= temperature <= 2.0**126:
            raise ValueError(f"temperature must be above 0 and finite, also in fp32, got {temperature}")
        return
    if not temperature.is_floating_point():
        raise TypeError(f"temperature has dtype {temperature.dtype}; expected floats, one a token")
    if temperature.shape != labels.shape or temperature.device != labels.device:
        raise ValueError(
            f"temperature is {tuple(temperature.shape)} on {temperature.device}; expected a number, or one a "
            f"token in the labels' shape {tuple(labels.shape)} on {labels.device}"
        )
