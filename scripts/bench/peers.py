"""Other fused linear cross entropies behind one interface, for the benchmark's ``--peers``.

    python -m scripts.bench.peers            one line a peer: ready, or why not
    python -m scripts.bench.peers --try-out  the same after one small step of each on this device

Nothing here is needed at import: a peer whose library is absent, or fails to import, stays in the
table with ``why_not``. On one device without tensor parallelism:

    torch-eager, torch-compile      linear, then cross entropy of fp32 logits
    torch-lce, torch-lce-sum        F.linear_cross_entropy (torch 2.13), chunked by its own defaults
    te                              linear, then Transformer Engine's Triton cross entropy
    liger, liger-large-chunks       Liger's Triton chunks: its defaults, and chunks of 4096 tokens or more
    liger-none                      the same per token: logits computed again in the backward
    liger-cutedsl-ce                cuBLAS products with Liger's CuTe row kernel
    liger-cute                      Liger's three CuTe products on Hopper
    liger-cute-scaled               Liger's CuTe pair per token, no logits in memory
    quack, quack-scaled-exp         QuACK's chunks: logits, and exponentials in the GEMM's epilogue
    cce, cce-exact                  Apple's Cut Cross Entropy: its defaults, and unfiltered with fp32 sums

With a vocabulary shard on each rank (``Parallel``). None of them knows sequence parallelism: they are
given the gathered hidden states, and the gather and the reduction of ``grad_hidden`` count as theirs.

    liger-tp-loop                   Liger without its NVSHMEM kernels: plain PyTorch on 512 tokens at a time
    verl-tp                         verl's Triton forward, a backward in slices of the vocabulary

Read in the sources of torch 2.13, Transformer Engine 2.20.2, Liger and its kernels 0.8.5, QuACK 0.6.5,
verl 0.9.1 and Cut Cross Entropy 25.6.4 (PyPI's 25.1.1 is older and has no ``cce_exact``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_fused_ce.command_line import Parser, command

#: ``(hidden [T, H], weight [V, H], labels [T]) -> loss``, ``[T]`` or a sum ``[]``.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
#: ``(T, H, V, dtype) -> None`` or the reason why these are refused.
Limits = Callable[[int, int, int, torch.dtype], str | None]

#: Longest reason that still fits a cell of the result table.
REASON_CHARS = 160

#: CuTe's errors come in terminal colours.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

#: Tokens of a chunk where a library lets its user choose: the fastest of 1024 to 8192 for most of
#: them on an H200 (Liger's own table in its issue 1472; QuACK's default).
CHUNK_TOKENS = 4096


#: Distributions that may hold verl's kernels: the whole, or their files alone.
VERL_NAMES = ("verl", "verl-ce")
#: Distributions that may hold TE's cross entropy: the whole, or its three files (``_te``).
TE_NAMES = ("transformer-engine", "transformer-engine-ce")


def one_line(error: BaseException) -> str:
    """``error`` as one line of at most ``REASON_CHARS``: its type and its text without colours."""
    text = " ".join(_COLOUR.sub("", str(error)).split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


@dataclass
class Parallel:
    """The tensor-parallel group that the peers of several ranks run on.

    ``sequence_parallel`` may change between steps.
    """

    group: Any  # torch.distributed.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Peer:
    """One implementation of ``loss = CE(hidden @ weight.T, labels)``, or the reason why it is absent.

    ``scalar_only`` peers build their gradients in the forward, so one upstream gradient must serve
    all tokens; the others take any per-token upstream. ``gemms`` counts the products of one step: 4
    where the backward computes the logits again.
    """

    name: str
    title: str
    scalar_only: bool = False
    gemms: int = 3
    why_not: str | None = None
    loss_of: Loss | None = None
    limits: Limits | None = None
    tensor_parallel: bool = False

    def refusal(self, T: int, H: int, V: int, dtype: torch.dtype) -> str | None:
        """Why this peer cannot take a problem of this shape and dtype, None where it can."""
        if self.why_not is not None:
            return self.why_not
        return self.limits(T, H, V, dtype) if self.limits is not None else None

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss with its autograd graph.

        ``hidden`` ``[T, H]`` and ``weight`` ``[V, H]`` in one dtype, ``labels`` ``[T]`` int64 within
        the vocabulary. Returns fp32: ``[T]``, or for ``scalar_only`` peers the sum over the tokens,
        ``[]``. A ``tensor_parallel`` peer takes this rank's shard of ``weight``, and with sequence
        parallelism this rank's ``[T / R, H]`` of ``hidden``; its collectives are `_whole_tokens`'s and
        its library's, the others have none. Raises what the library raises, RuntimeError where it is
        absent.
        """
        if self.loss_of is None:
            raise RuntimeError(f"peer {self.name} is absent: {self.why_not}")
        return self.loss_of(hidden, weight, labels).float()

    def upstream(self, grad_loss: Tensor) -> Tensor:
        """What this peer's ``backward`` can take in place of ``grad_loss`` ``[T]``, without a sync.

        ``grad_loss`` itself; for ``scalar_only`` peers its root mean square, fp32 ``[]``: every
        token's upstream, which is ``grad_loss`` itself only where that is one positive constant. A
        scalar ``grad_loss`` stays as it is.
        """
        if not self.scalar_only or grad_loss.ndim == 0:
            return grad_loss
        return grad_loss.float().square().mean().sqrt()

    def step(self, hidden: Tensor, weight: Tensor, labels: Tensor, grad_loss: Tensor) -> Tensor:
        """Forward and backward with ``upstream(grad_loss)``; the gradients end in ``.grad``.

        Shapes and the returned loss (detached) as in ``forward``.
        """
        loss = self.forward(hidden, weight, labels)
        loss.backward(self.upstream(grad_loss))  # type: ignore[no-untyped-call]
        return loss.detach()


def _version(*distributions: str) -> str:
    """The version of the first one that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"


def _hopper(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise RuntimeError("needs a GPU of compute capability 9.0 (Hopper)")


def _only(*dtypes: torch.dtype) -> Limits:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return lambda T, H, V, dtype: None if dtype in dtypes else f"takes {names} only"


# --- torch -----------------------------------------------------------------------------------------


def _linear_then_ce(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def _torch_compile(device: torch.device) -> Loss:
    """Static shapes; past dynamo's recompile limit ``fullgraph`` raises instead of running eager."""
    import torch._dynamo as dynamo

    # One entry for each shape of a benchmark run; torch's own default is 8.
    limit = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(dynamo.config, limit, max(getattr(dynamo.config, limit), 64))
    return torch.compile(_linear_then_ce, fullgraph=True, dynamic=False)


def _torch_lce(reduction: str) -> Callable[[torch.device], Loss]:
    """``F.linear_cross_entropy``, chunked where torch knows how: without options it is plain eager."""

    def build(device: torch.device) -> Loss:
        function: Any = getattr(F, "linear_cross_entropy", None)
        if function is None:
            raise RuntimeError(f"torch {torch.__version__} has no F.linear_cross_entropy")
        options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
        extra = {} if options is None else {"options": options()}
        return lambda hidden, weight, labels: function(hidden, weight, labels, reduction=reduction, **extra)

    return build


# --- Transformer Engine ----------------------------------------------------------------------------


def te_cross_entropy(overwrite: bool, group: Any = None) -> Callable[[Tensor, Tensor], Tensor]:
    """TE's ``(logits [T, 1, V], labels [T, 1]) -> loss [T, 1]``, or whatever its import raises.

    ``overwrite``: the logits' gradient takes their place. Where the whole TE does not import, a package
    ``transformer_engine_ce`` may hold the three Python files that this needs
    (``pytorch/cross_entropy.py`` and both ``triton/cross_entropy.py``).
    """
    try:
        module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    except Exception as error:
        try:
            module = importlib.import_module("transformer_engine_ce.pytorch.cross_entropy")
        except ImportError:
            raise error from None
    function: Any = module.parallel_cross_entropy
    extra: dict[str, bool] = {}
    if overwrite:
        if "overwrite_input" not in inspect.signature(function).parameters:
            raise RuntimeError(f"TE {_version(*TE_NAMES)} has no overwrite_input")
        extra["overwrite_input"] = True
    return lambda logits, labels: function(logits, labels, 0.0, False, group, **extra)


def _te(device: torch.device) -> Loss:
    function = te_cross_entropy(overwrite=False)
    return lambda hidden, weight, labels: function(
        F.linear(hidden, weight).unsqueeze(1), labels.unsqueeze(1)
    ).view(-1)


# --- Liger -----------------------------------------------------------------------------------------


def liger_chunk_budget(T: int, H: int, V: int, chunk_tokens: int) -> int:
    """The smallest power of two for Liger's ``chunk_mem_const`` that makes chunks of
    ``min(T, chunk_tokens)`` tokens or more.

    Liger's chunk is ``next_pow2(ceil(T / ceil(V / (budget * H))))`` tokens.
    """
    budget = 1
    while True:
        chunk = -(-T // -(-V // (budget * H)))
        if 1 << (chunk - 1).bit_length() >= min(T, chunk_tokens):
            return budget
        budget *= 2


def _liger(
    reduction: str, large: bool = False, row_kernel: str | None = None
) -> Callable[[torch.device], Loss]:
    """Liger's chunks. ``grad_weight`` is summed over the chunks in the weight's dtype (its default).

    The arguments are positional: ``Function.apply`` takes no others.
    """

    def build(device: torch.device) -> Loss:
        if row_kernel == "nvidia-cutedsl":
            importlib.import_module("cutlass.cute")
        # From the submodule: `liger_kernel.ops` itself may be swapped by LIGER_KERNEL_IMPL.
        module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        function: Any = module.LigerFusedLinearCrossEntropyFunction

        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            T, H = hidden.shape
            budget = liger_chunk_budget(T, H, weight.shape[0], CHUNK_TOKENS) if large else 1
            result: Tensor = function.apply(
                *(hidden, weight, labels, None, None, -100, 0.0, 0.0, reduction, None),
                *(False, None, False, False, False),  # z-loss, fp32 sums, token scaling, metrics
                *(row_kernel, None, budget),
            )[0]
            return result

        return loss

    return build


def _liger_cute(device: torch.device) -> Loss:
    """Compiles four kernels, some seconds in all, for every new (T, H, V)."""
    _hopper(device)
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    function: Any = module.LigerFusedLinearCrossEntropySM90Function
    return lambda hidden, weight, labels: function.apply(hidden, weight, labels, -100, "sum")


def _liger_cute_limits(T: int, H: int, V: int, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return "takes bfloat16 only"
    if T % 128 or V % 256:
        return "needs T % 128 == 0 and V % 256 == 0"
    return None


def _liger_cute_scaled(device: torch.device) -> Loss:
    """Compiles for about a minute for every new V, and for every new T below 1024.

    Checks its labels on the host in every forward (LIGER_SCALED_CE_SM90_VALIDATE_TARGETS=0: not). Its
    backward spins on a barrier of all its thread blocks: nothing else may run on the GPU meanwhile.
    """
    _hopper(device)
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    function: Any = module.LigerFusedScaledCrossEntropySM90Function
    return lambda hidden, weight, labels: function.apply(hidden, weight, labels)


# --- QuACK -----------------------------------------------------------------------------------------


def _quack(device: torch.device) -> Loss:
    """Untuned: tuning takes minutes in the first step."""
    function: Any = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda hidden, weight, labels: function(
        hidden, weight, labels, CHUNK_TOKENS, reduction="sum", tuned=False, use_scaled_exp=False
    )


def _quack_limits(T: int, H: int, V: int, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16, float16 only"
    return "needs T, H and V divisible by 8" if T % 8 or H % 8 or V % 8 else None


def scaled_exp_chunk(T: int, H: int) -> int | None:
    """Tokens of a chunk for QuACK's scaled-exp path, None where no choice works.

    Its product for ``grad_hidden`` tells a row factor from a column factor by the shape, and raises
    where a chunk (the last one padded to 128 tokens) has exactly ``H`` rows.
    """
    for chunk in (CHUNK_TOKENS, 8192, 2048, 1024):
        last = T - (-(-T // chunk) - 1) * chunk
        rows = {-(-last // 128) * 128} | ({chunk} if chunk < T else set())
        if H not in rows:
            return chunk
    return None


def _quack_scaled_exp(device: torch.device) -> Loss:
    _hopper(device)
    module = importlib.import_module("quack.linear_cross_entropy")
    function: Any = module.scaled_exp_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        chunk = scaled_exp_chunk(*hidden.shape)
        result: Tensor = function(hidden, weight, labels, chunk, reduction="sum")
        return result

    return loss


def _scaled_exp_limits(T: int, H: int, V: int, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return "takes bfloat16 only"
    if V % 128 or H % 8:
        return "needs V % 128 == 0 and H % 8 == 0"
    return f"no chunk without exactly H = {H} rows" if scaled_exp_chunk(T, H) is None else None


# --- Cut Cross Entropy -----------------------------------------------------------------------------


def _cce(impl: str) -> Callable[[torch.device], Loss]:
    """Finds ignored tokens on the host in every forward."""

    def build(device: torch.device) -> Loss:
        module = importlib.import_module("cut_cross_entropy")
        names = importlib.import_module("cut_cross_entropy.linear_cross_entropy")
        known = {name.lower() for name in names.LinearCrossEntropyImpl.__members__}
        if impl not in known:
            version = getattr(module, "__version__", _version("cut-cross-entropy"))
            raise RuntimeError(f"cut-cross-entropy {version} has no impl {impl!r}")
        function: Any = module.linear_cross_entropy
        return lambda hidden, weight, labels: function(hidden, weight, labels, reduction="none", impl=impl)

    return build


# --- over ranks ------------------------------------------------------------------------------------


# torch 2.13 renamed these and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _WholeTokens(torch.autograd.Function):
    """What Megatron puts around a layer that knows no sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parallel: Parallel, partial: bool) -> Tensor:
        ctx.parallel, ctx.partial, ctx.gathers = parallel, partial, parallel.sequence_parallel
        if not ctx.gathers:
            return hidden.view_as(hidden)
        whole = hidden.new_empty(parallel.size * hidden.shape[0], *hidden.shape[1:])
        _all_gather(whole, hidden.contiguous(), group=parallel.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parallel, grad = ctx.parallel, grads[0].contiguous()
        if ctx.partial and ctx.gathers:
            part = grad.new_empty(grad.shape[0] // parallel.size, *grad.shape[1:])
            _reduce_scatter(part, grad, group=parallel.group)
            grad = part
        elif ctx.partial:
            dist.all_reduce(grad, group=parallel.group)
        elif ctx.gathers:
            grad = grad.chunk(parallel.size)[parallel.rank]
        return grad, None, None


def _whole_tokens(hidden: Tensor, parallel: Parallel, partial: bool) -> Tensor:
    """``[T, H]`` for a peer that wants all tokens; ``partial``: its ``grad_hidden`` is not reduced.

    Collectives: with sequence parallelism an all-gather here and, where ``partial``, a reduce-scatter
    in the backward; without it an all-reduce in the backward where ``partial``.
    """
    whole: Tensor = _WholeTokens.apply(hidden, parallel, partial)
    return whole


def _liger_tp(device: torch.device, parallel: Parallel) -> Loss:
    """Liger's vocab-parallel op, which reduces ``grad_hidden`` on every rank."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    loop: Any = module._apply_tp_fallback  # the front end takes NVSHMEM's kernels where it can

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        whole = _whole_tokens(hidden, parallel, partial=False)
        # Temperature, ignored label, no entropy.
        result: Tensor = loop(whole, weight, labels, 1.0, -100, False, parallel.group)
        return result

    return loss


def verl_linear_cross_entropy() -> Any:
    """verl's ``(hidden, weight, labels, temperature, reduction, group) -> (log-probabilities, entropy)``.

    Where the whole verl does not import, a package ``verl_ce`` may hold the files that this needs. Raises
    whatever verl's import raises.
    """
    try:
        module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    except Exception as error:  # verl imports ray and more
        try:
            module = importlib.import_module("verl_ce.utils.kernel.linear_cross_entropy")
        except ImportError:
            raise error from None
    return module.linear_cross_entropy


def _verl_tp(device: torch.device, parallel: Parallel) -> Loss:
    """verl's log-probabilities, negated; its entropy comes along unasked.

    Its ``grad_hidden`` is this rank's share: under sequence parallelism the gather before it reduces
    that, and without it nobody in verl does, so `_whole_tokens` does.
    """
    function = verl_linear_cross_entropy()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        whole = _whole_tokens(hidden, parallel, partial=True)
        logprobs: Tensor = function(whole, weight, labels, 1.0, "none", parallel.group)[0]
        return -logprobs

    return loss


def _verl_limits(T: int, H: int, V: int, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16, float16 only"
    return "needs H % 128 == 0" if H % 128 else None


# --- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """``build`` takes the device, and the `Parallel` where the peer is ``tensor_parallel``."""

    peer: Peer
    build: Callable[..., Loss]
    needs_cuda: bool


def _entry(
    name: str,
    title: str,
    build: Callable[..., Loss],
    *,
    reduction: str = "none",
    gemms: int = 3,
    limits: Limits | None = None,
    needs_cuda: bool = True,
    tensor_parallel: bool = False,
) -> _Entry:
    peer = Peer(
        name,
        f"{title}, {reduction}",
        scalar_only=reduction != "none",
        gemms=gemms,
        limits=limits,
        tensor_parallel=tensor_parallel,
    )
    return _Entry(peer, build, needs_cuda)


def _table() -> list[_Entry]:
    torch_ = f"torch {torch.__version__}"
    te, te_dtypes = f"TE {_version(*TE_NAMES)}", _only(torch.bfloat16, torch.float32)
    liger, quack = f"Liger {_version('liger-kernel')}", f"QuACK {_version('quack-kernels')}"
    cce = f"Cut Cross Entropy {_version('cut-cross-entropy')}"
    bf16, large = _only(torch.bfloat16), f"chunks of {CHUNK_TOKENS} tokens or more"
    lce = f"{torch_}: F.linear_cross_entropy, its own chunks"
    plain = f"{torch_}: linear, cross_entropy of fp32 logits"

    def eager(device: torch.device) -> Loss:
        return _linear_then_ce

    return [
        _entry("torch-eager", plain, eager, needs_cuda=False),
        _entry("torch-compile", f"{plain}, compiled", _torch_compile, needs_cuda=False),
        _entry("torch-lce", lce, _torch_lce("none"), gemms=4, needs_cuda=False),
        _entry("torch-lce-sum", lce, _torch_lce("sum"), reduction="sum", needs_cuda=False),
        _entry("te", f"{te}: linear, parallel_cross_entropy", _te, limits=te_dtypes),
        _entry("liger", f"{liger}: Triton, its own chunks", _liger("sum"), reduction="sum"),
        _entry("liger-large-chunks", f"{liger}: Triton, {large}", _liger("sum", large=True), reduction="sum"),
        _entry("liger-none", f"{liger}: Triton, {large}", _liger("none", large=True), gemms=4),
        _entry(
            "liger-cutedsl-ce",
            f"{liger}: cuBLAS products, CuTe rows, {large}",
            _liger("sum", large=True, row_kernel="nvidia-cutedsl"),
            reduction="sum",
        ),
        _entry(
            "liger-cute",
            f"{liger}: CuTe SM90 products",
            _liger_cute,
            reduction="sum",
            limits=_liger_cute_limits,
        ),
        _entry(
            "liger-cute-scaled",
            f"{liger}: CuTe SM90 without logits in memory",
            _liger_cute_scaled,
            gemms=4,
            limits=bf16,
        ),
        _entry(
            "quack",
            f"{quack}: chunks of {CHUNK_TOKENS} tokens, untuned",
            _quack,
            reduction="sum",
            limits=_quack_limits,
        ),
        _entry(
            "quack-scaled-exp",
            f"{quack}: scaled-exp",
            _quack_scaled_exp,
            reduction="sum",
            limits=_scaled_exp_limits,
        ),
        _entry("cce", f"{cce}: filtered gradients", _cce("cce"), gemms=4),
        _entry("cce-exact", f"{cce}: unfiltered, fp32 sums", _cce("cce_exact"), gemms=4),
        _entry(
            "liger-tp-loop",
            f"{liger}: chunks of 512 tokens in PyTorch",
            _liger_tp,
            gemms=4,
            tensor_parallel=True,
        ),
        _entry(
            "verl-tp",
            f"verl {_version(*VERL_NAMES)}: Triton",
            _verl_tp,
            gemms=4,
            limits=_verl_limits,
            tensor_parallel=True,
        ),
    ]


def names() -> list[str]:
    """Every peer's name, in the order of the table; imports nothing."""
    return [entry.peer.name for entry in _table()]


def available(
    device: torch.device | str, names: Collection[str] | None = None, parallel: Parallel | None = None
) -> list[Peer]:
    """Every peer, ready for ``device`` or with ``why_not``; with ``names`` only those.

    With ``parallel`` those that are ``tensor_parallel`` are ready, without it the others.

    Libraries of peers that are left out are not imported: QuACK patches CuTe's tensor classes for
    the whole process, so a doubt about another CuTe peer is settled in a run without it. Raises
    ValueError for a name that is not in the table.
    """
    device = torch.device(device)
    table = _table()
    if names is not None:
        unknown = set(names) - {entry.peer.name for entry in table}
        if unknown:
            raise ValueError(
                f"no peer {', '.join(sorted(unknown))}; there are "
                f"{', '.join(entry.peer.name for entry in table)}"
            )
        table = [entry for entry in table if entry.peer.name in names]
    return [_load(entry, device, parallel) for entry in table]


def _load(entry: _Entry, device: torch.device, parallel: Parallel | None = None) -> Peer:
    if entry.needs_cuda and device.type != "cuda":
        return replace(entry.peer, why_not="needs a CUDA device")
    if entry.peer.tensor_parallel != (parallel is not None):
        why_not = "needs several ranks" if parallel is None else "knows no tensor parallelism"
        return replace(entry.peer, why_not=why_not)
    try:
        over = (parallel,) if entry.peer.tensor_parallel else ()
        return replace(entry.peer, loss_of=entry.build(device, *over))
    except Exception as error:
        # Whatever a foreign library raises at import is a reason, not an end.
        return replace(entry.peer, why_not=one_line(error))


def try_out(peer: Peer, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Peer:
    """The peer after one small step on ``device``, with ``why_not`` where that failed.

    The shapes suit every peer (T 384, H 256, V 1536); the first step compiles, which takes seconds.
    """
    if peer.why_not is not None:
        return peer
    T, H, V = 384, 256, 1536
    why_not = peer.refusal(T, H, V, dtype)
    if why_not is None:
        hidden = torch.randn(T, H, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(V, H, device=device) / H**0.5).to(dtype).requires_grad_()
        labels = torch.randint(0, V, (T,), device=device)
        try:
            loss = peer.step(hidden, weight, labels, torch.full((T,), 1.0 / T, device=device))
            if not bool(torch.isfinite(loss).all()):
                raise ArithmeticError("the loss of a small problem is not finite")
        except Exception as error:
            why_not = one_line(error)
    return replace(peer, why_not=why_not)


@command("peers")
def main(words: list[str]) -> int:
    parser = Parser("python -m scripts.bench.peers", __doc__ or "")
    parser.add_argument("--try-out", action="store_true", help="run one small step of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--names", nargs="+", choices=names(), help="these alone")
    options = parser.parse_args(words)
    for peer in available(options.device, options.names):
        if options.try_out:
            peer = try_out(peer, options.device)
        upstream = "one upstream for all tokens" if peer.scalar_only else "per token"
        state = "ready" if peer.why_not is None else f"NO: {peer.why_not}"
        print(f"{peer.name:18} {peer.gemms} GEMMs, {upstream:27} {state} [{peer.title}]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
