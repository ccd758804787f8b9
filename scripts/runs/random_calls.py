"""Random calls of the public functions, and their results by the plain definition (`selfcheck`)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import megatron_fused_ce as package
from megatron_fused_ce import rl
from megatron_fused_ce.scripts.lib import reference
from megatron_fused_ce.scripts.lib.reference import HeadInputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: What is compared with fp64 of each is :func:`exact`'s.
KINDS = ("plain", "options", "outputs", "labels", "teacher", "skipped")
NAMES = ("output", "grad_hidden", "grad_weight")


def drawn(seed: int, device: torch.device, kind: str) -> tuple[HeadInputs, dict[str, Any], Tensor]:
    """A problem, fields of the call's config, and its token weights."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"strategy": draw.choice(["store", "recompute", "grad_in_forward", "auto"])}
    options |= draw.choice([{}, {"num_chunks": draw.randint(1, 4)}, {"chunk_tokens": draw.choice([8, 16])}])
    options |= draw.choice([{}, {}, {"logits_backend": "gemm_rows"}])
    if kind == "options":
        one, two = {"z_loss": 0.01}, {"label_smoothing": 0.1}
        options |= draw.choice([one, two, one | two, one | {"logit_softcap": 5.0}])
    if kind == "skipped":
        options["skip_masked"] = True
    if kind in ("labels", "outputs") and options["strategy"] == "grad_in_forward":
        options["strategy"] = "store"
    sizes = {"s": draw.choice([8, 16, 24]), "b": draw.choice([1, 2]), "hidden_size": draw.choice([16, 64])}
    sizes |= {"vocab": draw.choice([48, 136]), "seed": seed}
    dtype = DTYPES[draw.choice(["fp32", "bf16"] if kind != "plain" else list(DTYPES))]
    of = draw.choice(["plain", "peaked", "plain", "high"])
    inputs = reference.make_inputs(of, **sizes, dtype=dtype, device=device)
    weights = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    weights = weights.masked_fill(weights < 0.3, 0.0)
    if kind == "skipped" or (options["strategy"] == "grad_in_forward" and draw.random() < 0.7):
        inputs = replace(inputs, grad_loss=0.3 * weights)
    return inputs, options, weights


def call(kind: str, inputs: HeadInputs, options: dict[str, Any], weights: Tensor) -> tuple[Tensor, ...]:
    """Output and both gradients (`NAMES`) by this package."""
    hidden, weight = (operand.clone().requires_grad_() for operand in (inputs.hidden, inputs.weight))
    config: dict[str, Any] = {"config": package.FusedCEConfig(**options)}
    weighted, upstream = {"token_weights": weights, **config}, inputs.grad_loss
    output: Any
    if kind == "labels":
        ids, upstream = _labels(inputs)
        output = rl.token_log_probs(hidden, weight, ids, **config).log_prob
    elif kind == "teacher":
        teacher = reference.make_teacher(inputs, 5)
        output = package.fused_linear_topk_distillation(hidden, weight, *teacher, **weighted)
    elif kind == "outputs":
        output = package.fused_linear_token_outputs(hidden, weight, inputs.labels, ["entropy"], **config)
        output = output.entropy
    else:
        output = package.fused_linear_cross_entropy(hidden, weight, inputs.labels, **weighted)
    output.backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    return output.detach(), hidden.grad, weight.grad


def _labels(inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """K labels a token, one of them twice, and their upstream gradients."""
    first = inputs.labels.abs() % len(inputs.weight)
    ids = torch.stack([first, (first * 7 + 3) % len(inputs.weight), first], -1)
    return ids, inputs.grad_loss.unsqueeze(-1) * torch.tensor([1.0, -0.5, 0.25], device=ids.device)


def exact(kind: str, inputs: HeadInputs, options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output and both gradients by the plain definition in ``dtype``."""
    names = ("z_loss", "label_smoothing", "logit_softcap")
    config = replace(inputs.config, **{name: options[name] for name in names if name in options})
    inputs = replace(inputs, config=config)
    if kind == "labels":
        made, _, *grads = reference.plain_several(inputs, *_labels(inputs), dtype)
        return made, *grads
    if kind == "teacher":
        return tuple(reference.plain_distillation(inputs, *reference.make_teacher(inputs, 5), dtype))
    if kind == "outputs":
        outputs, *grads = reference.plain_outputs(inputs, {"entropy": inputs.grad_loss}, dtype)
        assert outputs.entropy is not None
        return outputs.entropy, *grads
    return tuple(reference.plain_head(inputs, dtype))


def errors(made: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> list[float]:
    """Relative errors; of the output where it is finite and was not left out, 0 where there is nothing."""
    counts = torch.isfinite(true[0]) & (made[0] != 0)
    pairs = [(made[0][counts], true[0][counts]), *zip(made[1:], true[1:], strict=True)]
    return [reference.relative_error(value, right) for value, right in pairs]
