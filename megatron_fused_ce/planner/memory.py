"""Predicts the peak of a head's own buffers from shapes, dtype and strategy, in eight terms.

Not counted are inputs, ``grad_hidden`` and the wgrad accumulator. Forward and backward are predicted apart;
the peak is the larger one. Letters: ``T`` tokens of the tensor-parallel group of ``R`` ranks, ``H`` hidden
size, ``V`` vocabulary rows of this rank, ``C`` tokens of the longest chunk, ``e`` bytes of a hidden state (2
in bf16), ``u`` uses of the head whose forwards all come before the backwards::

    chunk_logits     n*e*C*V        logits of the chunk at hand, then their gradient. n is 1; 2 with
                                    grad_in_forward over several ranks; 0 if the stored E is the gradient
    stored_logits    u*e*S*V        logits, or E, of the S tokens that are stored: store all, mixed some
    grad_weight_sum  n*4*V*H        grad_weight in fp32. n is u with grad_in_forward; else 1 if the wgrad
                                    accumulator cannot take every chunk (sums_grad_weight), or 0
    hidden_states    n*e*C*H        n is 1 for rows scaled for the GEMM of grad_weight; with sequence
                                    parallelism up to 4, three gathered chunks and one of grad_hidden before
                                    its reduction. e*T*H if one GEMM makes grad_weight of all tokens.
                                    e*64*H of the weight over several ranks
    tile_statistics  n*8*C*V/256    the scaled-exp GEMM's, in the forward. n is 1; 2 over several ranks
    second_product   (f*V + 320)*C  logits and statistics of another hidden state and weight, H' wide and f
                                    bytes a number; f*C*H' for gathered hidden states; u*f*T*H' (with sequence
                                    parallelism over R) for a copy of all, if the backward reads them
    token_floats     u*32*T + 40*C  labels, statistics, losses; more for several labels a token; over several
                                    ranks 16*C*(1 + R) for each of two merges
    workspace        64 MiB         cuBLAS's, on a GPU

Logits in fp32 (``logit_precision``) take ``4*C*V``, and their gradient, ``e*C*V``, lies beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.sizes import SAMPLED_ROWS, TILE_COLUMNS
from megatron_fused_ce.planner.chunks import Cut

MIB = 2**20
#: Bytes of an element, by torch's name of the dtype.
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Where ``grad_weight`` ends: in an fp32 buffer that takes every chunk in place, in one of a lower precision,
#: in a tensor returned to autograd in the weight's dtype, or nowhere (a frozen weight).
WGRAD_ACCUMULATORS = ("main_grad", "low_main_grad", "returned", "none")
LOGITS_BACKENDS = ("scaled_exp", "gemm_rows")
#: Of a token: its label (int64), four saved statistics, its loss and its factor in the backward (fp32). In
#: the current chunk: copies of label, merged statistics and factor, and three floats that a GEMM reads.
TOKEN_BYTES, CHUNK_TOKEN_BYTES = 8 + 4 * 4 + 4 + 4, 8 + 4 * 4 + 4 + 3 * 4
#: Of each of several labels (:mod:`.logits.label_set`): its column (int32), log-probability and the caller's
#: copy, its logit or its share of the upstream gradient (fp32). In the current chunk: indices (int64) and
#: floats by which its entry is gathered and written.
LABEL_BYTES, CHUNK_LABEL_BYTES = 4 + 3 * 4, 72
#: A token's statistics of one rank (fp32). A packed merge holds this rank's and those of all; one by
#: all-reduces holds at most 36 bytes, never more.
SHARD_BYTES = 4 * 4
#: Statistics of a chunk's token with a second product: of both, at two temperatures, and what comes of them.
SECOND_TOKEN_BYTES = 4 * 80
#: cuBLAS's workspaces, as torch allocates them on Hopper: of the forward's thread and of autograd's, shared
#: with the rest of the model.
WORKSPACE_BYTES = 2 * 32 * MIB
#: torch's allocator takes buffers from 10 MiB on in steps of 2 MiB, at most 1 MiB more than is asked for.
ROUNDED_FROM, ROUNDING_BYTES = 10 * MIB, MIB
#: Megatron's own losses, at their peak, for each of the T * V logits: unfused the fp32 softmax (4) and, where
#: logits are not fp32, they or their gradient (2); its native fusion the softmax and its gradient in fp32,
#: and the gradient in bf16 (4 + 4 + 2). Of each further use that waits for its backward: the softmax (4).
#: Measured: docs/benchmarks/results/2026-11-21-h200-reach-llama3-8b.json.
STOCK_BYTES_PER_LOGIT, STOCK_BYTES_WAITING = {"unfused": 6, "native": 10}, 4


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan depends on. ``ValueError`` if a field does not fit.

    Ranks with the same inputs get the same plan: if vocabulary shards differ in size, give the largest as
    ``num_rows`` on all ranks.
    """

    num_tokens: int  # T; may be 0
    hidden_size: int  # H
    num_rows: int  # V
    dtype: str = "bfloat16"  # torch's name: bfloat16, float16 or float32
    num_parts: int = 1  # ranks whose parts make up one chunk: tp_size with sequence parallelism, else 1
    tp_size: int = 1  # R
    wgrad_accumulator: str = "main_grad"  # one of WGRAD_ACCUMULATORS
    #: whether the forward is given token weights, without which ``auto`` never takes ``grad_in_forward``
    token_weights_known: bool = False
    #: whether the loss was found not to be what ``grad_in_forward`` was promised
    promise_broken: bool = False
    logits_backend: str = "scaled_exp"  # one of LOGITS_BACKENDS
    saves_logits: bool = False  # whether the scaled-exp GEMM writes logits instead of E
    device: str = ""  # "cpu", or a GPU's name
    config: FusedCEConfig = field(default_factory=FusedCEConfig)  # the user's choices
    uses_in_flight: int = 1  # u: 1, and one for each depth of multi-token prediction
    labels_per_token: int = 0  # where there are several; 0 for one
    second_hidden_size: int = 0  # H' of a second product for the same V rows; 0 for none
    second_itemsize: int = 0  # f

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", tuple(ITEMSIZES)),
            ("wgrad_accumulator", WGRAD_ACCUMULATORS),
            ("logits_backend", LOGITS_BACKENDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        least = dict.fromkeys(("num_tokens", "labels_per_token", "second_hidden_size"), 0)
        least |= dict.fromkeys(("hidden_size", "num_rows", "num_parts", "tp_size", "uses_in_flight"), 1)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} must be {smallest} or more, got {getattr(self, name)}")
        if self.num_parts not in (1, self.tp_size):
            raise ValueError(
                f"num_parts is {self.num_parts} with tp_size {self.tp_size}; expected tp_size with "
                "sequence parallelism, else 1"
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def trained(self) -> bool:
        """Whether there is a ``grad_weight``."""
        return self.wgrad_accumulator != "none"

    @property
    def logits_in_fp32(self) -> bool:
        return self.config.logit_precision == "fp32" and self.logits_backend == "gemm_rows"

    @property
    def stored_itemsize(self) -> int:
        """Bytes of a number that is stored: of a logit, of ``E``, or with a second product of the gradient."""
        return 4 if self.logits_in_fp32 and not self.second_hidden_size else self.itemsize

    @property
    def saves_e(self) -> bool:
        """Whether stored rows get factors in the backward: those of ``E``, or of a second product's gradient."""
        if self.second_hidden_size:
            return self.dtype != "float16"
        return self.logits_backend == "scaled_exp" and not self.saves_logits


class Memory(NamedTuple):
    """Bytes of the head's own buffers at one moment, by the eight terms above."""

    chunk_logits: int
    stored_logits: int
    grad_weight_sum: int
    hidden_states: int
    tile_statistics: int
    second_product: int
    token_floats: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self)


def forward_memory(inputs: PlanInputs, cut: Cut, stored_chunks: int, in_forward: bool = False) -> Memory:
    """The forward's peak, with gradients if they are made ``in_forward``.

    Over several ranks a chunk's statistics are merged under the next chunk's GEMM: buffers that are read
    after the merge exist twice.
    """
    count, ranks, uses = cut.count, inputs.tp_size, inputs.uses_in_flight
    exp, second, gathers = (
        inputs.logits_backend == "scaled_exp",
        inputs.second_hidden_size,
        inputs.num_parts > 1,
    )
    under_way = min(count, 2) if ranks > 1 and not second else 1
    if in_forward:
        logits = under_way
        hidden = min(count, 3) + 1 if gathers else int(inputs.saves_e and inputs.trained)
    else:
        # The scaled-exp GEMM writes no E of a chunk that is not stored.
        logits = int(stored_chunks < count and (second > 0 or not exp))
        left = not inputs.promise_broken and (inputs.trained or stored_chunks < count)
        hidden = min(count, 2) + (uses - 1) * left if gathers else 0
    return _memory(
        inputs,
        cut,
        stored_chunks,
        logits=logits,
        gradients=int(in_forward),
        sums=uses if in_forward else 0,
        hidden=hidden,
        hidden_rows=-(-SAMPLED_ROWS // ranks) * ranks if exp and ranks > 1 and count else 0,
        tiles=under_way if in_forward or stored_chunks else 1,
        merges=under_way if ranks > 1 else 0,
    )


def backward_memory(
    inputs: PlanInputs, cut: Cut, stored_chunks: int, wgrad_at_once: bool = False, remade: bool = False
) -> Memory:
    """The backward's peak. It begins with the last chunk, whose gathered hidden states the forward left.

    ``remade``: it makes the gradients of ``grad_in_forward`` again, for an upstream gradient that is not what
    was promised. Those made in the forward are gone, those of the head's other uses wait.
    """
    count, again, uses = cut.count, stored_chunks < cut.count, inputs.uses_in_flight
    scales = inputs.saves_e and inputs.trained
    read = count if inputs.trained else count - stored_chunks
    left = 0 if remade or inputs.promise_broken else min(read, 1)
    if inputs.num_parts == 1:
        hidden = int(scales and not wgrad_at_once and (stored_chunks or inputs.second_hidden_size) > 0)
    elif wgrad_at_once:
        hidden = min(count, 2) + left * uses  # a chunk's grad_hidden is reduced beside the next one's
    else:
        # The chunk that was left takes no other buffer, unless its rows are scaled.
        hidden = min(read if scales and not again else read - left, 2) + 1 + left * uses
    return _memory(
        inputs,
        cut,
        stored_chunks,
        logits=int(again),
        gradients=int(again or not inputs.saves_e),
        sums=sums_grad_weight(inputs, min(count, 1) if wgrad_at_once else count) + (uses - 1) * remade,
        hidden=hidden,
        hidden_rows=inputs.num_tokens if wgrad_at_once else 0,
        second=int(again),
        second_copies=uses if again else 0,
    )


def _memory(
    inputs: PlanInputs,
    cut: Cut,
    stored_chunks: int,
    *,
    logits: int,
    gradients: int,  # of logits: in their place if of the same dtype
    sums: int,
    hidden: int,
    hidden_rows: int,  # more
    tiles: int = 0,
    merges: int = 0,
    second: int = 1,
    second_copies: int = 0,
) -> Memory:
    """Bytes of so many buffers, each of the longest chunk, and of what is there at any time."""
    tokens, capacity, uses = inputs.num_tokens, inputs.num_parts * cut.longest, inputs.uses_in_flight
    num_rows, itemsize, stored_itemsize = inputs.num_rows, inputs.itemsize, inputs.stored_itemsize
    on_gpu, labels = inputs.device != "cpu", inputs.labels_per_token
    rounding = ROUNDING_BYTES if on_gpu and stored_itemsize * capacity * num_rows >= ROUNDED_FROM else 0
    if logits and stored_itemsize == itemsize:
        gradients = 0
    of_logits = (logits * stored_itemsize + gradients * itemsize) * num_rows * capacity
    stored = stored_itemsize * num_rows * inputs.num_parts * cut.tokens_of(stored_chunks)
    second_row, second_token, shard = inputs.second_itemsize * inputs.second_hidden_size, 0, SHARD_BYTES
    if inputs.second_hidden_size:
        number = 4 + 4 * (itemsize < 4) if inputs.logits_in_fp32 else inputs.second_itemsize  # fp32: of both
        second_token = number * num_rows + SECOND_TOKEN_BYTES + (second_row if inputs.num_parts > 1 else 0)
        shard = 4 * SHARD_BYTES
    of_chunk = CHUNK_TOKEN_BYTES + CHUNK_LABEL_BYTES * labels + merges * shard * (1 + inputs.tp_size)
    # A sum and a maximum of each tile and token (fp32), and another sum where logits are stored.
    tile = 12 if inputs.saves_logits else 8
    tiles = tiles * -(-num_rows // TILE_COLUMNS) if inputs.logits_backend == "scaled_exp" else 0
    return Memory(
        chunk_logits=of_logits + (logits + gradients) * rounding,
        stored_logits=uses * (stored + stored_chunks * rounding),
        grad_weight_sum=sums * 4 * num_rows * inputs.hidden_size if inputs.trained else 0,
        hidden_states=itemsize * inputs.hidden_size * (hidden * capacity + hidden_rows),
        tile_statistics=tiles * tile * capacity,
        second_product=(
            second * second_token * capacity + second_copies * second_row * tokens // inputs.num_parts
        ),
        token_floats=(TOKEN_BYTES + LABEL_BYTES * labels) * tokens * uses + of_chunk * capacity,
        workspace=WORKSPACE_BYTES if on_gpu else 0,
    )


def sums_grad_weight(inputs: PlanInputs, num_gemms: int) -> bool:
    """Whether so many GEMMs of ``grad_weight`` are summed in fp32 before they reach the accumulator."""
    scaled = inputs.dtype == "float16"
    if inputs.wgrad_accumulator == "returned":
        # Without a chunk the sum is zeros.
        return inputs.dtype != "float32" and (num_gemms != 1 or scaled)
    return inputs.wgrad_accumulator == "low_main_grad" or (inputs.wgrad_accumulator == "main_grad" and scaled)


def size_in_words(num_bytes: int) -> str:
    """A size for people: tenths of a GiB, whole MiB below one GiB, tenths below 10 MiB."""
    if num_bytes >= 1024 * MIB:
        return f"{num_bytes / 1024 / MIB:.1f} GiB"
    return f"{num_bytes / MIB:.{0 if num_bytes >= 10 * MIB else 1}f} MiB"
