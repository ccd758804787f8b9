"""Random calls of the op, of another commit and of this checkout: the same bits, or errors as small?

    git worktree add build/old COMMIT
    python -m scripts.bench.same --old build/old --calls 1500
    torchrun --nproc-per-node 2 -m scripts.bench.same --old build/old

Plain cross-entropy must have the same bits: losses and both gradients. Of all else the errors are compared,
those of the gradients and outputs against fp64, relative to the norm: the median over the calls and the
largest. The exit status is 1 where bits differ, or where an error of this checkout is above 1.05 of the
other's.
"""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fused_ce.command_line import Parser, command, whole
from megatron_fused_ce.scripts.bench.commits import PACKAGE, Checkout, both, check_checkout
from megatron_fused_ce.scripts.bench.problem import World
from megatron_fused_ce.scripts.lib import gloo, reference
from megatron_fused_ce.scripts.lib.reference import HeadInputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Kinds of call beside the plain one; what is compared with fp64 is :func:`exact`'s.
KINDS = ("options", "outputs", "labels", "teacher", "skipped")
MOST = 1.05

#: What a call gives: outputs and gradients, of the rank's shard.
Made = dict[str, Tensor]


def drawn(seed: int, size: int, device: torch.device, kind: str) -> tuple[HeadInputs, dict[str, Any]]:
    """A problem over the whole vocabulary, and the call's config and arguments."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"strategy": draw.choice(["store", "recompute", "grad_in_forward", "auto"])}
    options |= draw.choice([{}, {"num_chunks": draw.randint(1, 4)}, {"chunk_tokens": draw.choice([8, 16])}])
    options |= draw.choice([{}, {}, {"merge": draw.choice(["packed", "all_reduce"])}])
    options |= draw.choice([{}, {}, {"logits_backend": "gemm_rows"}])
    if kind == "options":
        one, two = {"z_loss": 0.01}, {"label_smoothing": 0.1}
        options |= draw.choice([one, two, one | two, one | {"logit_softcap": 5.0}])
    if kind == "skipped":
        options["skip_masked"] = True
    if kind in ("labels", "outputs") and options["strategy"] == "grad_in_forward":
        options["strategy"] = "store"
    sizes = {"s": draw.choice([8, 16, 24]), "b": draw.choice([1, 2]), "hidden_size": draw.choice([16, 64])}
    dtype = draw.choice(["fp32", "bf16"] if kind != "plain" else list(DTYPES))
    inputs = reference.make_inputs(
        draw.choice(["plain", "peaked", "plain", "high"]),
        **sizes,
        vocab=size * draw.choice([48, 136]),
        dtype=DTYPES[dtype],
        seed=seed,
        device=device,
    )
    weights = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    weights = weights.masked_fill(weights < 0.3, 0.0)
    if kind == "skipped" or (options["strategy"] == "grad_in_forward" and draw.random() < 0.7):
        inputs = replace(inputs, grad_loss=0.3 * weights)
    return inputs, {"options": options, "weights": weights, "sequence_parallel": draw.random() < 0.5}


def call(folder: Checkout | None, world: World, kind: str, inputs: HeadInputs, given: dict[str, Any]) -> Made:
    """What a call gives, of the package in ``folder``, or of this one."""
    with folder or nullcontext():
        package, rl = import_module(PACKAGE), import_module(f"{PACKAGE}.rl")
        rows = len(inputs.weight) // world.size
        weight = inputs.weight[world.rank * rows :][:rows].clone().requires_grad_()
        parts = world.size if given["sequence_parallel"] else 1
        hidden = inputs.hidden.chunk(parts)[world.rank % parts].clone().requires_grad_()
        options: dict[str, Any] = {"config": package.FusedCEConfig(**given["options"])}
        if world.size > 1:
            options |= {"tp_group": world.group, "sequence_parallel": parts > 1}
        weights = {"token_weights": given["weights"]}
        upstream = inputs.grad_loss
        if kind == "labels":
            ids, upstream = _labels(inputs)
            made = {"log_prob": rl.token_log_probs(hidden, weight, ids, **options).log_prob}
        elif kind == "teacher":
            teacher = reference.make_teacher(inputs, 5)
            made = {
                "loss": package.fused_linear_topk_distillation(hidden, weight, *teacher, **weights, **options)
            }
        elif kind == "outputs":
            found = package.fused_linear_token_outputs(hidden, weight, inputs.labels, ["entropy"], **options)
            made = {"entropy": found.entropy}
        else:
            made = {
                "loss": package.fused_linear_cross_entropy(
                    hidden, weight, inputs.labels, **weights, **options
                )
            }
        (output,) = made.values()
        output.backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    return {"output": output.detach(), "grad_hidden": hidden.grad, "grad_weight": weight.grad}


def _labels(inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """K labels a token, one of them twice, and their upstream gradients."""
    first = inputs.labels.abs() % len(inputs.weight)
    ids = torch.stack([first, (first * 7 + 3) % len(inputs.weight), first], -1)
    return ids, inputs.grad_loss.unsqueeze(-1) * torch.tensor([1.0, -0.5, 0.25], device=ids.device)


def exact(
    kind: str, inputs: HeadInputs, options: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Output and both gradients by the plain definition in ``dtype``, None for fp64."""
    names = ("z_loss", "label_smoothing", "logit_softcap")
    config = replace(inputs.config, **{name: options[name] for name in names if name in options})
    inputs, wide = replace(inputs, config=config), dtype or torch.float64
    if kind == "labels":
        made, _, *grads = reference.plain_several(inputs, *_labels(inputs), wide)
        return made, *grads
    if kind == "teacher":
        return tuple(reference.plain_distillation(inputs, *reference.make_teacher(inputs, 5), wide))
    if kind == "outputs":
        outputs, *grads = reference.plain_outputs(inputs, {"entropy": inputs.grad_loss}, wide)
        assert outputs.entropy is not None
        return outputs.entropy, *grads
    return tuple(reference.plain_head(inputs, wide))


def errors(made: Made, true: tuple[Tensor, ...], world: World, sequence_parallel: bool) -> list[float]:
    """Relative errors of the rank's parts of them."""
    output, grad_hidden, grad_weight = true
    parts = world.size if sequence_parallel else 1
    rows = len(made["grad_weight"])
    own = grad_hidden.chunk(parts)[world.rank % parts], grad_weight[world.rank * rows :][:rows]
    counts = torch.isfinite(output) & (made["output"] != 0)
    pairs = [
        (made["output"][counts], output[counts]),
        *zip((made["grad_hidden"], made["grad_weight"]), own, strict=True),
    ]
    return [reference.relative_error(value, right) for value, right in pairs if right.any()]


@command("same")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.same", __doc__ or "")
    parser.add_argument("--old", type=Path, required=True, help="checkout of the other commit")
    parser.add_argument(
        "--calls",
        type=whole(most=10**6),
        default=300,
        help="of plain cross-entropy; a third as many of each other kind",
    )
    given = parser.parse_args(words)
    check_checkout(given.old)
    world = World()
    warnings.filterwarnings("ignore", ".*(upstream gradient|promise)")
    tell: Callable[..., None] = print if world.rank == 0 else lambda *_: None
    checkouts = both(given.old)
    failed = 0
    for kind in ("plain", *KINDS):
        found: dict[str, list[float]] = {name: [] for name in checkouts}
        different = []
        for seed in range(given.calls if kind == "plain" else given.calls // 3):
            inputs, of_call = drawn(seed, world.size, world.device, kind)
            made = {name: call(each, world, kind, inputs, of_call) for name, each in checkouts.items()}
            if not all(torch.equal(made["old"][name], made["new"][name]) for name in made["new"]):
                different.append(seed)
            if kind != "plain":
                true = exact(kind, inputs, of_call["options"])
                for name in checkouts:
                    found[name] += errors(made[name], true, world, of_call["sequence_parallel"])
        different = sorted(set().union(*world.everyone(different)))
        if kind == "plain":
            tell(f"plain: {given.calls} calls, {len(different)} with other bits {different[:5] or ''}")
            failed |= bool(different)
            continue
        worst, median = (
            {name: max(world.everyone(of(each))) for name, each in found.items()}
            for of in (max, statistics.median)
        )
        failed |= any(of["new"] > MOST * of["old"] for of in (worst, median))
        tell(
            f"{kind}: {given.calls // 3} calls, {len(different)} with other bits; error, median "
            f"{median['old']:.2e} -> {median['new']:.2e}, worst {worst['old']:.2e} -> {worst['new']:.2e}"
        )
    world.close()
    return failed


if __name__ == "__main__":
    gloo.end(main())
