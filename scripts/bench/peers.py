"""Other fused linear cross entropies behind one interface, for the benchmark's ``--peers``.

    python -m scripts.bench.peers            one line a peer: ready, or why not
    python -m scripts.bench.peers --try-out  the same after one small step of each on this device, checked
                                             against fp64

Each is a function of its library's module, the world, ``hidden [T, H]``, ``weight [V, H]`` and ``labels [T]``
that gives the loss: ``[T]``, or where it is ``summed`` (gradients are built in the forward, so one upstream
gradient serves all tokens) the sum ``[]``. Nothing here is needed at import: a peer whose library is absent,
or fails to import, stays in the table with the reason.

Those with a vocabulary shard on each rank (``over_ranks``) know no sequence parallelism: they are given the
gathered hidden states, and the gather and the reduction of ``grad_hidden`` count as theirs.

Read in the sources of torch 2.13, Transformer Engine 2.20.2, Liger and its kernels 0.8.5, QuACK 0.6.5,
verl 0.9.1 and Cut Cross Entropy 25.6.4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.cli.command_line import Parser, UsageError, command
from megatron_fused_ce.scripts.bench.cases import Cell
from megatron_fused_ce.scripts.bench.op import PEER, Case, limits, why_not
from megatron_fused_ce.scripts.bench.problem import Outputs, Problem, World
from megatron_fused_ce.scripts.lib import gloo
from megatron_fused_ce.scripts.lib.results import version

#: ``(module, world, hidden, weight, labels) -> loss``
Loss = Callable[[Any, World, Tensor, Tensor, Tensor], Tensor]

#: Tokens of a chunk where a library lets its user choose: the fastest of 1024 to 8192 for most of
#: them on an H200 (Liger's own table in its issue 1472; QuACK's default).
CHUNK_TOKENS = 4096
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Peer:
    """One implementation of ``loss = CE(hidden @ weight.T, labels)``; 4 products: logits computed twice."""

    name: str
    loss: Loss
    library: str  # its distribution
    module: str
    summed: bool = False
    products: int = 3
    limits: Callable[[Problem], str | None] | None = None
    on_hopper: bool = False  # there alone
    over_ranks: bool = False

    def find(self) -> Any:
        if self.on_hopper and torch.cuda.get_device_capability() != (9, 0):
            raise RuntimeError("needs a GPU of compute capability 9.0 (Hopper)")
        return import_module(self.module)

    def case(self, world: World) -> Case:
        """Its row, or why there is none for these ranks."""
        reason: str | None = "needs several ranks" if self.over_ranks else "knows no tensor parallelism"
        if self.library != "torch" and not world.on_gpu:
            reason = "needs a CUDA device"
        elif self.over_ranks == (world.size > 1):
            reason = why_not(self.find)

        def run(problem: Problem) -> Outputs:
            operands = problem.hidden, problem.weight, problem.labels
            return {"loss": self.loss(import_module(self.module), world, *operands).float()}

        return Case(
            self.name,
            PEER,
            run,
            grads=(("loss", "one_upstream" if self.summed else "grad_loss"),),
            base="roof-4" if self.products == 4 else "roof",
            over={"over_roof": "roof"} if self.products == 4 else {},
            products=self.products,
            why_not=world.first_word(reason),  # a library that one rank lacks
            limits=self.limits,
        )


PEERS: dict[str, Peer] = {}


def peer(name: str, library: str, module: str, *given: Any, **facts: Any) -> Callable[[Any], Any]:
    """Decorator: ``loss(*given, ...)`` is the peer ``name``, of which ``facts`` are `Peer`'s."""

    def kept(loss: Any) -> Any:
        PEERS[name] = Peer(name, partial(loss, *given), library, module, **facts)
        return loss

    return kept


def peers(world: World, names: Collection[str] | None) -> list[Case]:
    """Those that are named, or every one that can run on so many ranks.

    Libraries of peers that are left out are not imported: QuACK patches CuTe's tensor classes for the whole
    process, so a doubt about another CuTe peer is settled in a run without it.
    """
    if names is None:
        return [one.case(world) for one in PEERS.values() if one.over_ranks == (world.size > 1)]
    if unknown := set(names) - PEERS.keys():
        raise UsageError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return [one.case(world) for one in PEERS.values() if one.name in names]


# --- torch; Transformer Engine's loss --------------------------------------------------------------


def dynamo_for_many_shapes() -> Any:
    """dynamo's options, with an entry for each shape of a run; torch's own default is 8."""
    config: Any = import_module("torch._dynamo").config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, limit, max(getattr(config, limit), 64))
    return config


@peer("torch-eager", "torch", "torch")
def _linear_then_ce(torch_: Any, world: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Linear, then cross entropy of fp32 logits."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


@peer("torch-compile", "torch", "torch._dynamo")
def _torch_compile(dynamo: Any, world: Any, *operands: Tensor) -> Any:
    """The same, compiled for static shapes; past dynamo's limit ``fullgraph`` raises and runs no eager."""
    return _compiled()(None, None, *operands)


@cache
def _compiled() -> Any:
    dynamo_for_many_shapes()
    return torch.compile(_linear_then_ce, fullgraph=True, dynamic=False)


def te_cross_entropy(overwrite: bool, group: Any = None) -> Callable[[Tensor, Tensor], Tensor]:
    """TE's ``(logits [T, 1, V], labels [T, 1]) -> loss [T, 1]``, for `loss.megatron`.

    ``overwrite``: the logits' gradient takes their place.
    """
    function: Any = import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    if overwrite and "overwrite_input" not in inspect.signature(function).parameters:
        raise RuntimeError("this Transformer Engine has no overwrite_input")
    extra = {"overwrite_input": True} if overwrite else {}
    return lambda logits, labels: function(logits, labels, 0.0, False, group, **extra)


# --- Liger, QuACK, Cut Cross Entropy ---------------------------------------------------------------

LIGER, QUACK = "liger_kernel.ops", "quack.linear_cross_entropy"


def liger_chunk_budget(T: int, H: int, V: int) -> int:
    """The smallest power of two for Liger's ``chunk_mem_const`` that makes chunks of `CHUNK_TOKENS` or more.

    Liger's chunk is ``next_pow2(ceil(T / ceil(V / (budget * H))))`` tokens.
    """
    tokens = ((1 << n, -(-T // -(-V // (H << n)))) for n in count())
    return next(n for n, t in tokens if 1 << (t - 1).bit_length() >= min(T, CHUNK_TOKENS))


# From the submodule: `liger_kernel.ops` itself may be swapped by LIGER_KERNEL_IMPL.
@peer("liger-cutedsl-ce", "liger-kernel", f"{LIGER}.fused_linear_cross_entropy", True, True, summed=True)
@peer("liger-large-chunks", "liger-kernel", f"{LIGER}.fused_linear_cross_entropy", True, False, summed=True)
@peer("liger", "liger-kernel", f"{LIGER}.fused_linear_cross_entropy", False, False, summed=True)
def _liger(
    large: bool, cute: bool, module: Any, world: Any, hidden: Tensor, weight: Tensor, labels: Tensor
) -> Any:
    """Liger's Triton chunks: its defaults, `CHUNK_TOKENS` or more, CuTe's row kernel for Triton's.

    ``grad_weight`` is summed over the chunks in the weight's dtype (its default).
    """
    budget = liger_chunk_budget(len(hidden), hidden.shape[1], len(weight)) if large else 1
    return module.LigerFusedLinearCrossEntropyFunction.apply(
        *(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum", None),
        *(False, None, False, False, False),  # z-loss, fp32 sums, token scaling, metrics
        *("nvidia-cutedsl" if cute else None, None, budget),  # `apply` takes no names
    )[0]


@peer(
    "liger-cute",
    "liger-kernel",
    f"{LIGER}.cutedsl.ops.fused_linear_cross_entropy_sm90",
    summed=True,
    on_hopper=True,
    limits=limits(BF16, T=128, V=256),
)
def _liger_cute(module: Any, world: Any, *operands: Tensor) -> Any:
    """Liger's three CuTe products. Compiles four kernels, some seconds, for every new (T, H, V)."""
    return module.LigerFusedLinearCrossEntropySM90Function.apply(*operands, -100, "sum")


@peer("quack", "quack-kernels", QUACK, summed=True, limits=limits(BF16, FP16, T=8, H=8, V=8))
def _quack(module: Any, world: Any, *operands: Tensor) -> Any:
    """QuACK's chunks of `CHUNK_TOKENS`, untuned: tuning takes minutes in the first step."""
    options = {"reduction": "sum", "tuned": False, "use_scaled_exp": False}
    return module.chunked_linear_cross_entropy(*operands, CHUNK_TOKENS, **options)


def scaled_exp_chunk(T: int, H: int) -> int:
    """Tokens of a chunk for QuACK's scaled-exp path. Raises ValueError where no choice works.

    Its product for ``grad_hidden`` tells a row factor from a column factor by the shape, and raises
    where a chunk (the last one padded to 128 tokens) has exactly ``H`` rows.
    """
    for chunk in (CHUNK_TOKENS, 8192, 2048, 1024):
        last = T - (-(-T // chunk) - 1) * chunk
        if -(-last // 128) * 128 != H and not (H == chunk < T):
            return chunk
    raise ValueError(f"no chunk without exactly H = {H} rows")


@peer(
    "quack-scaled-exp", "quack-kernels", QUACK, summed=True, on_hopper=True, limits=limits(BF16, H=8, V=128)
)
def _quack_scaled_exp(module: Any, world: Any, *operands: Tensor) -> Any:
    """QuACK's chunks with exponentials in the GEMM's epilogue."""
    chunk = scaled_exp_chunk(*operands[0].shape)
    return module.scaled_exp_linear_cross_entropy(*operands, chunk, reduction="sum")


@peer("cce-exact", "cut-cross-entropy", "cut_cross_entropy", "cce_exact", products=4)
@peer("cce", "cut-cross-entropy", "cut_cross_entropy", "cce", products=4)
def _cce(impl: str, module: Any, world: Any, *operands: Tensor) -> Any:
    """Apple's Cut Cross Entropy; it finds ignored tokens on the host.

    ``cce``, its default, leaves out tiles whose gradients are all below 2^-12; ``cce_exact`` none.
    """
    return module.linear_cross_entropy(*operands, reduction="none", impl=impl)


# --- over ranks ------------------------------------------------------------------------------------


def _whole_tokens(hidden: Tensor, world: World, partial: bool) -> Tensor:
    """``[T, H]``, by Megatron, for a peer that knows no sequence parallelism.

    ``partial``: its ``grad_hidden`` is not reduced over the ranks. Collectives: with sequence parallelism an
    all-gather here and, where ``partial``, a reduce-scatter in the backward; without it an all-reduce in the
    backward where ``partial``.
    """
    from megatron.core.tensor_parallel import mappings

    whole: Tensor = hidden
    if world.parts > 1:
        whole = mappings.gather_from_sequence_parallel_region(hidden, partial, world.group)
    elif partial:
        whole = mappings.copy_to_tensor_model_parallel_region(hidden, world.group)
    return whole


@peer(
    "liger-tp-loop", "liger-kernel", f"{LIGER}.fused_linear_scaled_cross_entropy", products=4, over_ranks=True
)
def _liger_tp(module: Any, world: World, hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
    """Liger's vocab-parallel op without its NVSHMEM kernels: plain PyTorch on 512 tokens at a time.

    It reduces ``grad_hidden`` on every rank.
    """
    whole = _whole_tokens(hidden, world, False)
    # The front end takes NVSHMEM's kernels where it can. Temperature, ignored label, no entropy.
    return module._apply_tp_fallback(whole, weight, labels, 1.0, -100, False, world.group)


VERL = "verl.utils.kernel.linear_cross_entropy"


@peer("verl-tp", "verl", VERL, products=4, over_ranks=True, limits=limits(BF16, FP16, H=128))
def _verl_tp(module: Any, world: World, hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
    """verl's Triton forward, a backward in slices of the vocabulary; its entropy comes along unasked.

    Its ``grad_hidden`` is this rank's share: under sequence parallelism the gather before it reduces
    that, and without it nobody in verl does, so `_whole_tokens` does.
    """
    whole = _whole_tokens(hidden, world, True)
    return -module.linear_cross_entropy(whole, weight, labels, 1.0, "none", world.group)[0]


@command("peers")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.peers", __doc__ or "")
    parser.add_argument("--try-out", action="store_true", help="run one small step of each")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--names", nargs="+", choices=list(PEERS), help="these alone")
    given = parser.parse_args(words)
    from megatron_fused_ce.scripts.bench import loss, measure

    world = World(use_gpu=None if given.device is None else given.device == "cuda")
    # A size that suits every peer; the first step compiles, which takes seconds.
    problem = loss.Loss(Cell.of("256x1536", 384), world, dtype=BF16)
    for one in PEERS.values() if given.names is None else (PEERS[name] for name in given.names):
        case = one.case(world)
        outcome = measure.Outcome(case, case.why_not)
        if given.try_out:
            measure.check([outcome], problem, world)
        upstream = "one upstream for all tokens" if one.summed else "per token"
        state = "ready" if outcome.reason is None else f"NO: {outcome.reason}"
        about = f"{one.library} {version(one.library)}"
        print(f"{one.name:18} {one.products} GEMMs, {upstream:27} {state} [{about}]", flush=True)
    world.close()
    return 0


if __name__ == "__main__":
    gloo.end(main())
