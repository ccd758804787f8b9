"""What scripts/dev/sanitize.py runs under each of compute-sanitizer's tools: every kernel, small and odd.

    python -m scripts.dev.sanitize_workload rows|portable|hopper --results FILE [--control TOOL] [--poison]

Each check compares with the definition in fp64, so a run in which nothing was launched fails. Launches are
counted by kernel; a kernel of the group that was never launched fails too. Then come right kernels that do
what a tool does not follow (sanitize_right.py), and last the control: a kernel with the very error that the
tool looks for.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fused_ce import FusedCEConfig, fused_linear_distillation, fused_linear_topk_distillation
from megatron_fused_ce.call import Call
from megatron_fused_ce.kernels import (
    gemm_variants,
    row_kernels,
    scaled_exp_rows,
    token_kernels,
    upstream_kernels,
)
from megatron_fused_ce.loss import merge_shards
from megatron_fused_ce.op import linear_cross_entropy
from megatron_fused_ce.scripts.lib.reference import (
    FLOOR,
    LOSS_OPTIONS,
    HeadInputs,
    HeadResult,
    assert_close,
    assert_within,
    make_inputs,
    make_teacher,
    plain_distillation,
    plain_outputs,
    relative_error,
)
from megatron_fused_ce.scripts.lib.results import PACKAGE

KERNELS = PACKAGE / "kernels"
#: Groups are processes: one that hangs under a tool costs its own findings alone.
GROUPS = ("rows", "portable", "hopper")
#: Modules whose kernels a group must launch, all of them.
MODULES = {
    "rows": ("row_kernels", "divergence", "token_kernels", "upstream_kernels"),
    "portable": ("scaled_exp", "scaled_exp_rows"),
    "hopper": ("scaled_exp_hopper",),
}
STRATEGIES = ("recompute", "store", "grad_in_forward")
#: Of a kernel's PTX: what runs beside the threads that issued it.
ASYNCHRONOUS = {
    "cp.async.bulk.tensor": "TMA",
    "mbarrier": "mbarrier",
    "wgmma": "wgmma",
    "cp.async.cg": "cp.async",
    "cp.async.ca": "cp.async",
}


def entry_kernels() -> dict[str, tuple[str, ...]]:
    """By module of kernels/: the compiled functions that the host names, to launch them.

    The others are called by compiled functions alone.
    """
    found = {}
    for file in sorted(KERNELS.glob("*.py")):
        compiled, named = [], set()
        for node in ast.parse(file.read_text()).body:
            is_function = isinstance(node, ast.FunctionDef)
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            if is_function and any("jit" in each for each in decorators):
                compiled.append(node.name)  # type: ignore[attr-defined]
            else:
                named |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if names := tuple(name for name in compiled if name in named):
            found[file.stem] = names
    return found


def kernels_module(name: str) -> ModuleType:
    return importlib.import_module(f"megatron_fused_ce.kernels.{name}")


@dataclass
class Launches:
    """Launches of entry kernels by name, and what their PTX holds."""

    counted: Counter[str]
    asynchronous: dict[str, set[str]]

    def counting(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counted[name] += 1
            compiled = run(*args, **kwargs)
            ptx = getattr(compiled, "asm", {}).get("ptx", "")
            self.asynchronous[name] |= {said for word, said in ASYNCHRONOUS.items() if word in ptx}
            return compiled

        return counted


@contextmanager
def watched(modules: tuple[str, ...]) -> Iterator[Launches]:
    """Counts the launches of every entry kernel of some modules."""
    kernels = {
        name: getattr(kernels_module(module), name) for module in modules for name in entry_kernels()[module]
    }
    launches = Launches(Counter(dict.fromkeys(kernels, 0)), {name: set() for name in kernels})
    usual = {name: kernel.run for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        kernel.run = launches.counting(name, kernel.run)
    # Launches past Triton's binder would not be counted.
    launch = kernels_module("launch")
    directly, launch._called_directly = launch._called_directly, lambda: False  # type: ignore[attr-defined]
    try:
        yield launches
    finally:
        launch._called_directly = directly  # type: ignore[attr-defined]
        for name, kernel in kernels.items():
            kernel.run = usual[name]


# --- checks ----------------------------------------------------------------------------------

Check = Callable[[torch.device], None]


def on(inputs: HeadInputs, device: torch.device) -> HeadInputs:
    return replace(
        inputs,
        hidden=inputs.hidden.to(device),
        weight=inputs.weight.to(device),
        labels=inputs.labels.to(device),
        grad_loss=inputs.grad_loss.to(device),
    )


def evaluate(inputs: HeadInputs, device: torch.device, **options: Any) -> HeadResult:
    """Loss and gradients of the op on the device, on the CPU again."""
    there = on(inputs, device)
    hidden, weight = there.hidden.requires_grad_(), there.weight.requires_grad_()
    config = inputs.config
    if config.strategy == "grad_in_forward":
        options["token_weights"] = there.grad_loss / 1.5
    loss = linear_cross_entropy(Call(hidden, weight, there.labels, config=config, **options)).loss
    loss.backward(there.grad_loss)
    assert hidden.grad is not None and weight.grad is not None
    return HeadResult(loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu())


def head(kind: str, sizes: dict[str, Any], start: int = 0, **fields: Any) -> Check:
    """The op against the definition; ``start`` is the first id of the rows."""

    def check(device: torch.device) -> None:
        config = FusedCEConfig(num_chunks=2, **fields)
        inputs = replace(make_inputs(kind, **sizes), config=config)
        moved = replace(inputs, labels=inputs.labels + start)
        assert_close(evaluate(moved, device, vocab_start=start, with_argmax=True), inputs)

    return check


def outputs(device: torch.device) -> None:
    """Entropy and its like with their gradients."""
    names = ("log_prob", "lse", "entropy")
    inputs = make_inputs("plain", **row_sizes(torch.float32))
    upstreams = {name: inputs.grad_loss * (index + 1) for index, name in enumerate(names)}
    there = on(inputs, device)
    hidden, weight = there.hidden.requires_grad_(), there.weight.requires_grad_()
    made = linear_cross_entropy(
        Call(
            hidden,
            weight,
            there.labels,
            config=FusedCEConfig(num_chunks=2, strategy="store", row_backend="triton"),
            outputs=(*names, "predicted"),
            differentiable=names,
        )
    ).outputs
    torch.autograd.backward(
        [getattr(made, name) for name in names], [x.to(device) for x in upstreams.values()]
    )
    exact, grad_hidden, grad_weight = plain_outputs(inputs, upstreams, torch.float64)
    assert hidden.grad is not None and weight.grad is not None and made.predicted is not None
    pairs = [(getattr(made, name), getattr(exact, name)) for name in names]
    for value, true in (*pairs, (hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        error = relative_error(value.detach().cpu(), true)
        assert error < 5 * FLOOR[torch.float32], error
    assert exact.predicted is not None and torch.equal(made.predicted.cpu(), exact.predicted)


def distillation(device: torch.device) -> None:
    """Targets of a teacher: several columns of a row, some twice, some outside."""
    dtype = torch.float32
    inputs = make_inputs("plain", **row_sizes(dtype))
    teacher = make_teacher(inputs, 5)
    there = on(inputs, device)
    hidden, weight = there.hidden.requires_grad_(), there.weight.requires_grad_()
    config = FusedCEConfig(num_chunks=2, strategy="recompute", row_backend="triton")
    ids, log_probs = (x.to(device) for x in teacher)
    loss = fused_linear_topk_distillation(hidden, weight, ids, log_probs, config=config)
    loss.backward(there.grad_loss)
    assert hidden.grad is not None and weight.grad is not None
    made = HeadResult(loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu())
    exact, eager = (plain_distillation(inputs, *teacher, t) for t in (torch.float64, dtype))
    assert_within(made, exact, eager, dtype)


def divergence(device: torch.device) -> None:
    """Reverse KL from a teacher with less padding, labels of some columns beside it."""
    inputs = make_inputs("plain", **row_sizes(torch.float32))
    generator, real = torch.Generator().manual_seed(5), 320
    of_teacher = [torch.randn(size, generator=generator) / 8 for size in ((23, 3, 24), (325, 24))]
    there = on(inputs, device)
    hidden, weight = there.hidden.requires_grad_(), there.weight.requires_grad_()
    loss = fused_linear_distillation(
        hidden,
        weight,
        *(x.to(device) for x in of_teacher),
        divergence="reverse_kl",
        labels=there.labels.clamp(0, real - 1),
        label_weights=0.5,
        config=FusedCEConfig(num_chunks=2, row_backend="triton", true_vocab_size=real),
    ).loss
    loss.backward(there.grad_loss)
    exact, rows = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    z_s, z_t = (
        (x @ y.t())[..., :real] for x, y in ((exact, rows), (of_teacher[0].double(), of_teacher[1].double()))
    )
    log_s, log_t = z_s.log_softmax(-1), z_t.log_softmax(-1)
    labels = inputs.labels.t().clamp(0, real - 1).unsqueeze(-1)
    true = (log_s.exp() * (log_s - log_t)).sum(-1) - 0.5 * log_s.gather(-1, labels).squeeze(-1)
    true.t().backward(inputs.grad_loss.double())
    assert hidden.grad is not None and weight.grad is not None
    made = loss.detach(), hidden.grad, weight.grad
    for value, right in zip(made, (true.detach().t(), exact.grad, rows.grad), strict=True):
        assert right is not None
        error = relative_error(value.cpu(), right)
        assert error < 5 * FLOOR[torch.float32], error


def shards(device: torch.device) -> None:
    """Two shards of strided rows, merged by every one of the token kernels."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, 331, generator=generator).to(device)
    labels = torch.tensor([0, 149, 150, 330, -1, 331, 7], device=device)
    parts = zip((0, 150), logits.split((150, 181), dim=1), strict=True)
    stats = torch.stack(
        [row_kernels.row_statistics(part, labels - start, 1.0).shard for start, part in parts]
    )
    plain, made = merge_shards(stats), token_kernels.merge_shards(stats)
    row_max = plain.terms[0]
    summed = sum(token_kernels.shard_addends(shard, row_max) for shard in stats)
    assert isinstance(summed, Tensor)
    loss, terms = token_kernels.token_loss(summed, row_max)
    close = torch.testing.assert_close
    for value, true in ((made.loss, plain.loss), (loss, plain.loss), (terms, plain.terms)):
        close(value, true, rtol=4e-6, atol=1e-6)
    exact = torch.nn.functional.cross_entropy(
        logits.double().cpu(), labels.cpu().clamp(0, 330), reduction="none"
    )
    known = torch.tensor([0, 1, 2, 3, 6])
    close(loss.cpu()[known].double(), exact[known], rtol=1e-5, atol=1e-6)


def pause(device: torch.device) -> None:
    if device.type != "cuda":
        return
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    token_kernels.pause(device)
    ended.record()
    ended.synchronize()
    assert began.elapsed_time(ended) * 1e6 > 0.9 * token_kernels.PAUSE_NS


def rescaling(device: torch.device) -> None:
    """``scale_rows`` and ``add_scaled_`` at odd sizes."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, 2051, generator=generator).to(device)
    factor = torch.randn(7, generator=generator).to(device)
    out = scaled_exp_rows.scale_rows(x, factor, torch.empty_like(x))
    torch.testing.assert_close(out, x * factor[:, None])
    total = x.clone()
    scaled_exp_rows.add_scaled_(total, out, factor[3], torch.zeros(1, dtype=torch.int64, device=out.device))
    torch.testing.assert_close(total, x + factor[3] * out)
    copy = scaled_exp_rows.scaled_copy(x, factor[3], torch.bfloat16)
    torch.testing.assert_close(copy, (factor[3] * x).bfloat16())


def upstream(device: torch.device) -> None:
    """The two kernels of ``upstream_kernels`` at an odd number of tokens."""
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(4099, generator=generator).to(device)
    scaled = upstream_kernels.scaled_weights(weights, 8, 1.0)
    ratio = scaled.double() / weights.double()
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-6, atol=0.0)
    scale, mismatch = upstream_kernels.fit_scalar(0.3 * weights, weights, 1e-3, 1e-6)
    assert abs(scale.item() - 0.3) < 1e-6 and not mismatch.item()
    assert upstream_kernels.fit_scalar(weights.square(), weights, 1e-3, 1e-6)[1].item()


def outlier(device: torch.device) -> None:
    """A tile far above its row's reference: whole rows are finalized, with their statistics or after them."""
    sizes = exp_sizes(device)
    inputs = make_inputs("plain", **sizes)
    inputs.hidden[..., 0] = 1.0
    inputs.weight[sizes["vocab"] // 2 + 1] = 0.0
    inputs.weight[sizes["vocab"] // 2 + 1, 0] = 100.0
    for z_loss in (0.0, 1e-3):
        config = FusedCEConfig(strategy="store", num_chunks=2, logits_backend="scaled_exp", z_loss=z_loss)
        inputs = replace(inputs, config=config)
        made = evaluate(inputs, device)
        if device.type == "cuda":
            assert_close(made, inputs)


def row_sizes(dtype: torch.dtype, vocab: int = 331) -> dict[str, Any]:
    return {"s": 23, "b": 3, "hidden_size": 40, "vocab": vocab, "dtype": dtype}


def exp_sizes(device: torch.device) -> dict[str, Any]:
    """Ragged tiles in both directions: of 128 x 256 on a GPU, of 32 x 64 under the interpreter."""
    if device.type == "cuda":
        return {"s": 67, "b": 3, "hidden_size": 72, "vocab": 520, "dtype": torch.bfloat16}
    return {"s": 11, "b": 3, "hidden_size": 40, "vocab": 136, "dtype": torch.float32}


def checks_of_rows() -> dict[str, Check]:
    rows: dict[str, Any] = {"logits_backend": "gemm_rows", "row_backend": "triton"}
    made: dict[str, Check] = {"shards": shards, "pause": pause, "upstream": upstream}
    for dtype in (torch.bfloat16, torch.float32):
        for strategy in STRATEGIES:
            sizes = row_sizes(dtype)
            made[f"{strategy} {dtype}"] = head("odd-labels", sizes, strategy=strategy, **rows)
    for name, options in LOSS_OPTIONS.items():
        sizes = row_sizes(torch.bfloat16)
        made[name] = head("odd-labels", sizes, strategy="recompute", **rows, **options)
    for vocab in (1, 2048, 4099):
        sizes = row_sizes(torch.float32, vocab)
        made[f"{vocab} columns"] = head("plain", sizes, strategy="store", **rows)
    made["from id 1000"] = head("odd-labels", row_sizes(torch.float32), 1000, **rows)
    return made | {"outputs": outputs, "distillation": distillation, "divergence": divergence}


def checks_of_exp(device: torch.device) -> dict[str, Check]:
    sizes = exp_sizes(device)
    made: dict[str, Check] = {"rescaling": rescaling, "outlier": outlier}
    for strategy in STRATEGIES:
        exp: dict[str, Any] = {"strategy": strategy, "logits_backend": "scaled_exp"}
        made[strategy] = head("odd-labels", sizes, **exp)
        made[f"{strategy}, all options"] = head(
            "odd-labels", sizes, z_loss=1e-3, logit_softcap=30.0, true_vocab_size=45, **exp
        )
    small = {**sizes, "s": 1, "b": 1, "vocab": 8}
    made["one token, 8 columns"] = head("plain", small, strategy="recompute", logits_backend="scaled_exp")
    made["from id 1000"] = head("odd-labels", sizes, 1000, strategy="store", logits_backend="scaled_exp")
    return made


@contextmanager
def product(name: str) -> Iterator[None]:
    """The op takes this form of the product."""
    chosen, usual = kernels_module(name), gemm_variants.gemm_for
    gemm_variants.gemm_for = lambda device: chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        gemm_variants.gemm_for = usual


def run(group: str, device: torch.device) -> dict[str, Any]:
    """All checks of a group: what went wrong by name, and the launches."""
    failed = {}
    checks = checks_of_rows() if group == "rows" else checks_of_exp(device)
    form = "scaled_exp_hopper" if group == "hopper" else "scaled_exp"
    with watched(MODULES[group]) as launches, product(form):
        for name, check in checks.items():
            try:
                check(device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"[:300]
    here = {"_pause_kernel"} if device.type != "cuda" else set()
    for name, count in launches.counted.items():
        if not count and name not in here:
            failed[name] = "was never launched"
    asynchronous = {name: sorted(found) for name, found in launches.asynchronous.items()}
    return {
        "group": group,
        "checks": len(checks),
        "failed": failed,
        "launches": dict(launches.counted),
        "asynchronous": asynchronous,
    }


# --- controls --------------------------------------------------------------------------------


@triton.jit
def _control_out_of_bounds_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads one element behind the end."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at <= numel, other=0.0)
    tl.store(out_ptr + at, x, mask=at < numel)


@triton.jit
def _control_uninitialised_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Right by itself; its input was never written."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0)
    tl.store(out_ptr + at, x + 1.0, mask=at < numel)


@triton.jit
def _control_race_kernel(out_ptr):  # type: ignore[no-untyped-def]
    """Each thread reads what a thread of another warp wrote into shared memory, without a barrier."""
    read = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 racy[512];
        .reg .u32 base, thread, mine, next;
        mov.u32 thread, %tid.x;
        mov.u32 base, racy;
        shl.b32 mine, thread, 2;
        add.u32 mine, mine, base;
        st.volatile.shared.u32 [mine], thread;
        add.u32 next, thread, 32;
        and.b32 next, next, 127;
        shl.b32 next, next, 2;
        add.u32 next, next, base;
        ld.volatile.shared.u32 $0, [next];
        }""",
        "=r,r",
        [tl.arange(0, 128)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + tl.arange(0, 128), read)


#: By tool, the kernel that it must report.
CONTROLS = {
    "memcheck": "_control_out_of_bounds_kernel",
    "racecheck": "_control_race_kernel",
    "initcheck": "_control_uninitialised_kernel",
}


def control(tool: str, device: torch.device) -> None:
    """May leave the context destroyed."""
    numel = 100
    out = torch.zeros(128, device=device)
    x = torch.empty(numel, device=device)
    if tool == "racecheck":
        _control_race_kernel[(1,)](out.int(), num_warps=4)
    elif tool == "initcheck":
        _control_uninitialised_kernel[(1,)](x, out, numel, BLOCK=128, num_warps=4)
    else:
        _control_out_of_bounds_kernel[(1,)](x.zero_(), out, numel, BLOCK=128, num_warps=4)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--control", choices=tuple(CONTROLS))
    parser.add_argument("--poison", action="store_true", help="torch.empty gives NaN")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(options.poison)
    results = run(options.group, device)
    torch.use_deterministic_algorithms(False)
    if options.control and options.group != "rows" and device.type == "cuda":
        # Compiles for Hopper alone.
        from megatron_fused_ce.scripts.dev import sanitize_right

        results["failed"] |= dict.fromkeys(sanitize_right.run(options.control, device), "a wrong result")
    options.results.write_text(json.dumps(results))
    print(f"{options.group}: {results['checks']} checks, failed: {results['failed']}", flush=True)
    if options.control and device.type == "cuda":
        try:
            control(options.control, device)
        except Exception as error:
            print(f"control: {error}", flush=True)
        # Nothing is left to tidy up in a context that a tool has destroyed.
        sys.stdout.flush()
        os._exit(bool(results["failed"]))
    return bool(results["failed"])


if __name__ == "__main__":
    sys.exit(main())
