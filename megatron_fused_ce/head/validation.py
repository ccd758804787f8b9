"""Checks the arguments of one call before anything runs. Errors say: expected, got, what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fused_ce.head.agree import must_agree
from megatron_fused_ce.head.call import Call
from megatron_fused_ce.losses.outputs import OUTPUTS
from megatron_fused_ce.ranks.collectives import VocabParallel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The ranks exchange ids as fp32, which is exact up to 2**24.
LARGEST_ID = 2**24


def check_arguments(call: Call, comm: VocabParallel) -> None:
    """Check the arguments that this rank was given; the ranks compare theirs later.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if call.caller_error is not None:
        raise call.caller_error
    _check_tensors(call, comm)
    _check_outputs(call, comm)
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
    must_agree(call)  # raises for a value that ranks could not compare


def check_plain(name: str, tensor: object) -> None:
    """Check that an argument is a tensor whose memory kernels can read.

    Raises:
        TypeError: it is no tensor, a DTensor, or one of torch.func's.
        ValueError: it is on the meta device.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if hasattr(tensor, "placements"):  # a DTensor, told without the import of its class
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


def check_one_device(**tensors: Tensor | None) -> None:
    """Check that the tensors, given by their names, are on one device.

    Raises:
        ValueError: they are not.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{listed}; expected all on one device")


def _check_tensors(call: Call, comm: VocabParallel) -> None:
    """Check types, shapes, dtypes and devices of the tensors, and ``vocab_start``."""
    hidden, weight, labels, weights = call.hidden, call.weight, call.labels, call.token_weights
    for name in ("hidden", "weight", "labels"):
        check_plain(name, getattr(call, name))
    if hidden.dtype not in DTYPES:
        raise TypeError(
            f"hidden has dtype {hidden.dtype}; expected float32, bfloat16 or float16: cast it first"
        )
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight has dtype {weight.dtype} and hidden {hidden.dtype}; expected one dtype: "
            "cast one of them, or run under torch.autocast"
        )
    if hidden.dim() not in (2, 3):
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; expected [s, b, H] or [T, H]")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels have dtype {labels.dtype}; expected int64 (or int32) token ids")
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected [V, H], this rank's vocabulary rows, "
            "with at least one row"
        )
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has H = {hidden.shape[-1]} and weight H = {weight.shape[1]}; "
            "expected the same hidden size: hidden [s, b, H], weight [V, H]"
        )
    expected = (*hidden.shape[1:-1], hidden.shape[0] * comm.num_parts)
    if tuple(labels.shape) != expected:
        num_parts = comm.num_parts
        given = f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}"
        if num_parts > 1 and labels.shape[::-1] == hidden.shape[:-1]:
            raise ValueError(
                f"{given}, all tokens of them; expected this rank's part of the tokens, one of {num_parts}, "
                "or sequence_parallel=False"
            )
        if hidden.dim() == 3 and labels.shape == (hidden.shape[0], hidden.shape[1] * num_parts):
            given += ": one of them is transposed"
        raise ValueError(
            f"{given}; expected hidden [s, b, H] with labels [b, s], or [T, H] with [T], here labels "
            f"{expected}" + (f" on each of {num_parts} sequence-parallel ranks" if num_parts > 1 else "")
        )
    if weights is not None and not (isinstance(weights, Tensor) and weights.shape == labels.shape):
        came = getattr(weights, "shape", weights)
        raise ValueError(f"token_weights are {came}; expected a tensor of the labels' shape {expected}")
    check_one_device(hidden=hidden, weight=weight, labels=labels, token_weights=weights)
    start = call.vocab_start
    if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
        raise ValueError(
            f"vocab_start is {start!r}; expected the first global id of this rank's rows "
            "(0 or more), or None to find it"
        )
    if call.sequence_parallel and call.tp_group is None:
        raise ValueError(
            "sequence_parallel=True without tp_group: give the group whose ranks hold the other parts of the "
            "tokens, or leave sequence_parallel out"
        )
    if start and comm.size == 1:
        raise ValueError(
            f"vocab_start is {start} without a tensor-parallel group of several ranks: this rank has "
            "the whole vocabulary, from id 0 on; pass tp_group, or leave vocab_start out"
        )


def _check_outputs(call: Call, comm: VocabParallel) -> None:
    """Check the names of the requested outputs."""
    known = {**OUTPUTS, **dict(call.terms)}
    for name in call.outputs:
        if name not in known and name not in call.other_targets.outputs:
            raise ValueError(f"no such output: {name!r}; choose of {', '.join(OUTPUTS)}")
    if len(set(call.outputs)) < len(call.outputs):
        raise ValueError(f"outputs are {call.outputs}; name each once")
    with_ids = any("best" in known[name].needs for name in call.outputs if name in known)
    if with_ids and call.weight.shape[0] * comm.size > LARGEST_ID:
        raise ValueError(
            f"predicted ids are exact below {LARGEST_ID}; {call.weight.shape[0]} rows on each of "
            f"{comm.size} ranks are more"
        )


def _check_temperature(temperature: float | Tensor, labels: Tensor) -> None:
    """Check a number, or dtype and shape of a tensor; its values are checked when they are used."""
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
