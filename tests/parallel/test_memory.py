"""Every buffer that the planner counts, against the storages that a call of the op really holds."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy, fused_linear_distillation
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.planner import memory
from megatron_fused_ce.planner.chunks import Cut
from tests.support.ranks import Rank, on_ranks

#: A shard and a chunk whose buffers differ in shape, also from samples and merges: seven tiles of columns on
#: a GPU; on a CPU six, by one of tokens, as the interpreter takes a moment for each.
H, V, C = (16, 1600, 40) if torch.cuda.is_available() else (16, 384, 24)
#: Of a teacher.
H_T = 20
Shape = tuple[Any, ...]  # a dtype and the lengths


def cases(strategy: str) -> dict[str, dict[str, Any]]:
    """Keyword arguments of a strategy's cases, four chunks where they say no other: more than any ring of
    buffers has room for."""
    exp, rows = {"logits_backend": "scaled_exp"}, {"logits_backend": "gemm_rows"}
    sp, frozen, fp32 = {"sequence_parallel": True}, {"trained": False}, {"logit_precision": "fp32"}
    jsd, kl = {**rows, "divergence": "jsd"}, {**rows, "divergence": "forward_kl"}
    found = {
        f"{of['logits_backend']}{' sp' * bool(split)} chunks={count}": {**of, **split, "num_chunks": count}
        for of in (exp, rows)
        for split in ({}, sp)
        for count in (1, 4)
    }
    found |= {
        "scaled_exp frozen weight": {**exp, **sp, **frozen},
        "gemm_rows frozen weight": {**rows, **sp, **frozen},
        "logits in fp32": {**rows, **fp32},
        "two all-reduces": {**exp, **sp, "merge": "all_reduce"},
        "beside a teacher": jsd,
        "beside a teacher sp": {**kl, **sp},
        "beside a teacher frozen weight": {**jsd, **sp, **frozen},
        "beside a teacher logits in fp32": {**jsd, **fp32},
    }
    return {f"{strategy} {name}": {"strategy": strategy, **case} for name, case in found.items()}


CASES = {**cases("recompute"), **cases("store"), **cases("grad_in_forward")}


@on_ranks(pytest.param(1, marks=pytest.mark.rest), 2)
@pytest.mark.parametrize("case", CASES)
def test_buffers(rank: Rank, case):
    if rank.size == 1 and CASES[case].get("sequence_parallel"):
        pytest.skip("one rank has all tokens")
    # Row kernels in plain PyTorch work in copies of fewer rows than a chunk has.
    with patch.object(rows_torch, "BLOCK_ELEMENTS", 8 * V):
        peaks_are_as_predicted(rank, **CASES[case])


class Storages(TorchDispatchMode):
    """The most storages that were alive together, by the dtype and shape that each was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: Counter[Shape] = Counter()
        self._live: Counter[Shape] = Counter()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset(self) -> None:
        self.peak = Counter(self._live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(result):
            storage, shape = tensor.untyped_storage(), (tensor.dtype, *tensor.shape)
            key = storage._cdata
            if key in self._seen or key in given:
                continue
            self._seen[key] = weakref.ref(storage, functools.partial(self._gone, key, shape))
            self._live[shape] += 1
            if {C, H} & set(shape) and self._live[shape] > max(self.peak[shape], 1):
                gc.collect()  # Triton's interpreter leaves cycles that hold its arguments
            self.peak[shape] = max(self.peak[shape], self._live[shape])
        return result

    def _gone(self, key: int, shape: Shape, _: object) -> None:
        self._seen.pop(key)
        self._live[shape] -= 1


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in tensors(item)]
    if isinstance(tree, dict):
        return tensors(list(tree.values()))
    return []


def peaks_are_as_predicted(
    rank: Rank,
    *,
    strategy: str,
    logits_backend: str,
    sequence_parallel: bool = False,
    merge: str = "packed",
    num_chunks: int = 4,
    trained: bool = True,
    logit_precision: str = "auto",
    divergence: str | None = None,
) -> None:
    """Forward and backward each by itself, buffer by buffer."""
    # What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter.
    lower = rank.device.type == "cuda" or logit_precision == "fp32"
    dtype = torch.bfloat16 if lower else torch.float32
    num_tokens = num_chunks * C
    parts = rank.size if sequence_parallel else 1
    generator = torch.Generator().manual_seed(rank.rank)
    hidden = torch.randn(num_tokens // parts, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    hidden = hidden.to(rank.device, dtype).requires_grad_()
    weight = weight.to(rank.device, dtype).requires_grad_(trained)
    # The same on every rank.
    labels = torch.arange(num_tokens, device=rank.device) % (rank.size * V)
    weights = torch.rand(num_tokens, generator=torch.Generator().manual_seed(9)).to(rank.device)
    config = FusedCEConfig(
        strategy=strategy,
        chunk_tokens=C,
        logits_backend=logits_backend,
        merge=merge,
        logit_precision=logit_precision,
    )
    inputs = memory.PlanInputs(
        config=config,
        num_tokens=num_tokens,
        hidden_size=H,
        num_rows=V,
        dtype=str(dtype).removeprefix("torch."),
        num_parts=parts,
        tp_size=rank.size,
        wgrad_accumulator="returned" if trained else "none",
        token_weights_known=True,
        logits_backend=logits_backend,
        device="cpu",
        second_hidden_size=H_T if divergence else 0,
        second_itemsize=dtype.itemsize if divergence else 0,
    )
    stored = num_chunks if strategy == "store" else 0
    cut = Cut.of_length(num_tokens // parts, C // parts), stored
    # Row scales stand for them in what the scaled-exp GEMM saves, and beside a teacher.
    saves_e = inputs.saves_e
    saves_terms = strategy != "store" or not saves_e
    settings = {
        **{"tp_group": rank.group, "sequence_parallel": sequence_parallel, "config": config},
        **{"token_weights": weights, "vocab_start": rank.rank * V},
    }
    teacher = torch.randn(num_tokens // parts, H_T), torch.randn(V, H_T)
    teacher_hidden, teacher_weight = (x.to(rank.device, dtype) for x in teacher)

    def head() -> torch.Tensor:
        if divergence is None:
            return fused_linear_cross_entropy(hidden, weight, labels, **settings)
        of_teacher = {"divergence": divergence, "labels": labels, "temperature": 2.0}
        return fused_linear_distillation(
            hidden, weight, teacher_hidden, teacher_weight, **of_teacher, **settings
        ).loss

    with Storages() as seen:
        loss = head()
        # grad_hidden is not the head's own: it may have the shape of a chunk's hidden states, or of all.
        alike = hidden.shape[0] // C if hidden.shape[0] in (C, num_tokens) else 0
        at_once = strategy == "store" and saves_e and trained
        facts = inputs, *cut, strategy == "grad_in_forward", at_once
        forward = memory.memory_of(*facts, backward=False)
        compare(
            "forward",
            inputs,
            merge,
            seen.peak,
            forward,
            alike if strategy == "grad_in_forward" else 0,
            # The last chunk's are made when one merge is left of two, which have their shape with the rows.
            max(1, num_chunks - (logits_backend == "gemm_rows")) if saves_terms else 1,
        )
        seen.reset()
        loss.backward(weights)
    if strategy != "grad_in_forward":
        backward = memory.memory_of(*facts, backward=True)
        compare("backward", inputs, merge, seen.peak, backward, alike)
        return
    # Made again for another upstream gradient: what the forward made is gone by then.
    hidden.grad = weight.grad = None
    del loss
    with warnings.catch_warnings(action="ignore"), Storages() as seen:
        loss = head()
        gc.collect()  # as above
        seen.reset()
        loss.backward(weights.square())
    again = memory.memory_of(*facts, backward=True)
    compare("backward", inputs, merge, seen.peak, again, alike)
    assert seen.peak[torch.float32, V, H] == trained


def compare(
    when: str,
    inputs: memory.PlanInputs,
    merge: str,
    seen: Counter[Shape],
    predicted: memory.Memory,
    alike: int,
    saved_terms: int = 0,
) -> None:
    """``saved_terms``: chunks whose merged terms are alive together."""
    ranks, e, dtype, fp32 = inputs.tp_size, inputs.itemsize, getattr(torch, inputs.dtype), torch.float32
    tile_columns = memory.TILE_COLUMNS
    if not torch.cuda.is_available():
        from megatron_fused_ce.kernels import scaled_exp

        tile_columns = scaled_exp.INTERPRETER_TILING.block_n
    num_tiles = -(-V // tile_columns)
    logits = predicted.chunk_logits + predicted.stored_logits
    beside = inputs.second_hidden_size > 0
    of_teacher = C * inputs.second_itemsize * H_T if inputs.num_parts > 1 else 0
    if predicted.second_product:
        # Beside its logits: hidden states of the chunk, in the backward a copy of all, and statistics.
        copy = e * H_T * (inputs.num_tokens // inputs.num_parts) if when == "backward" else 0
        logits += predicted.second_product - of_teacher - copy - memory.SECOND_TOKEN_BYTES * C
    sampled = ranks * -(-memory.SAMPLED_ROWS // ranks)
    samples = int(ranks > 1 and when == "forward" and inputs.logits_backend == "scaled_exp")
    hidden = predicted.hidden_states - samples * e * sampled * H
    # Over several ranks the rest of the tokens' floats are merge buffers.
    merge_bytes = predicted.token_floats - memory.CHUNK_TOKEN_BYTES * C
    merge_bytes -= memory.TOKEN_BYTES * inputs.num_tokens
    tiles = 4 * C * -(-V // memory.TILE_COLUMNS)
    chunks = inputs.num_tokens // C

    def of_tokens(width: int) -> int:
        """Buffers of a chunk, and those of all chunks in one."""
        of_all = chunks * seen[dtype, chunks * C, width] if chunks > 1 else 0
        return seen[dtype, C, width] + of_all

    logits_in_fp32 = 0 if dtype == fp32 else seen[fp32, C, V]
    counted = {
        "[C, V]": (of_tokens(V) + 4 / e * logits_in_fp32, logits / (e * C * V)),
        "[C, H]": (of_tokens(H) - alike, hidden / (e * C * H)),
    }
    if beside:
        # A copy of a single chunk, made at the end of the forward, has that shape too.
        copies = inputs.config.strategy != "store" and inputs.num_tokens == C * inputs.num_parts
        chunks_of_it = of_teacher // (e * C * H_T) if predicted.second_product else 0
        alone = when == "forward" and not chunks_of_it
        expected = max(chunks_of_it, int(copies)) if alone else chunks_of_it + copies * (when != "forward")
        counted["[C, H_t]"] = (seen[dtype, C, H_T], expected)
    # Triton's interpreter and gloo hold on to the last arguments that they were given.
    if when == "forward":
        # A sum and a maximum of each tile.
        counted["[tiles, C]"] = seen[fp32, num_tiles, C], predicted.tile_statistics / tiles
    if ranks > 1:
        counted["[S, H]"] = seen[dtype, sampled, H], samples
        if beside and when == "forward":
            # Both sides', at both temperatures; merged terms, as below, count among a teacher's floats.
            merges = ranks * seen[fp32, ranks, 4, 4 * C] + seen[fp32, 4, 4 * C]
            counted["[R, 4, 4 C]"] = merges, merge_bytes / (64 * C) + 1
        elif merge == "packed" and when == "forward":
            # A shard's statistics by the scaled-exp GEMM have a fifth row, which stays on this rank.
            merges = 16 * C * (ranks * seen[fp32, ranks, 4, C] + seen[fp32, 4, C] + seen[fp32, 5, C])
            # A merged chunk's terms have that shape too; they are counted among the tokens' floats.
            terms = 16 * C * saved_terms
            counted["[R, 4, C] and [4, C]"] = (merges, merge_bytes + terms)
    wrong = {name: pair for name, pair in counted.items() if pair[0] != pair[1]}
    assert not wrong, f"{when}, (there, predicted): {wrong}"
