"""Predicts the peak of a head's own buffers from shapes, dtype and strategy, in eight terms.

Inputs, ``grad_hidden`` and the wgrad accumulator are not counted. Forward and backward are predicted apart;
the peak is the larger one. Letters: ``T`` tokens of the tensor-parallel group of ``R`` ranks, ``H`` hidden
size, ``V`` vocabulary rows of this rank, ``C`` tokens of the longest chunk, ``e`` bytes of a hidden state (2
in bf16), ``u`` uses of the head whose forwards all come before the backwards::

    chunk_logits     n*e*C*V        logits of the chunk at work, then their gradient. n is 1; it is 2 with
                                    grad_in_forward over several ranks, and 0 if stored E is the gradient
    stored_logits    u*e*S*V        logits, or E, of the S tokens that are stored: store all, mixed some
    grad_weight_sum  n*4*V*H        grad_weight in fp32. n is u with grad_in_forward; else it is 1 if the
                                    wgrad accumulator cannot take every chunk (sums_grad_weight), or 0
    hidden_states    n*e*C*H        n is 1 for a chunk with scaled rows, which the GEMM of grad_weight reads
                                    beside E; with sequence parallelism up to 3 + u, for gathered chunks
                                    and one of grad_hidden before its reduction. And e*T*H if one GEMM makes
                                    grad_weight of all tokens; e*64*H of the weight over several ranks
    tile_statistics  n*8*C*V/256    of the scaled-exp GEMM's forward. n is 1, or 2 over several ranks
    second_product   (f*V + 320)*C  logits and statistics of another hidden state and weight, H' wide and f
                                    bytes a number. With sequence parallelism f*C*H' for hidden states; if
                                    the backward reads them a copy of all on this rank, u*f*H' a token
    token_floats     u*32*T + 40*C  labels, statistics and losses, more for several labels a token; over
                                    several ranks 16*C*(1 + R) for each of two merges
    workspace        64 MiB         of cuBLAS, on a GPU

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
#: Transformer Engine's loss: logits and their gradient in bf16 (2 + 2).
#: Measured: docs/benchmarks/results/2026-11-21-h200-reach-llama3-8b.json.
STOCK_BYTES_PER_LOGIT, STOCK_BYTES_WAITING = {"unfused": 6, "native": 10, "te": 4}, 4


def stock_bytes_per_logit(loss: str, in_fp32: bool) -> int:
    """Of :data:`STOCK_BYTES_PER_LOGIT`; unfused, logits in fp32 become their softmax in place."""
    return STOCK_BYTES_PER_LOGIT[loss] - 2 * (loss == "unfused" and in_fp32)


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan depends on. ``ValueError`` if ``num_rows`` or ``uses_in_flight`` is below 1.

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
    #: whether ``auto`` without a budget stores up to :data:`.choose.STORED_BY_DEFAULT` of logits
    may_store: bool = False
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
        for name in ("num_rows", "uses_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def trained(self) -> bool:
        """Whether there is a ``grad_weight``."""
        return self.wgrad_accumulator != "none"

    @property
    def num_gemms(self) -> float:
        """GEMMs of a step, each as long as the head's logits take."""
        return 2 + self.trained + self.second_hidden_size / self.hidden_size

    @property
    def logits_in_fp32(self) -> bool:
        return self.config.logit_precision == "fp32" and self.logits_backend == "gemm_rows"

    @property
    def stored_itemsize(self) -> int:
        """Bytes of a number that may be stored: a logit, ``E``, or with a second product the gradient."""
        return 4 if self.logits_in_fp32 and not self.second_hidden_size else self.itemsize

    @property
    def saves_e(self) -> bool:
        """Whether the backward scales what is stored by row: ``E``, or with a second product the gradient."""
        if self.second_hidden_size:
            return self.dtype != "float16"
        return self.logits_backend == "scaled_exp" and not self.saves_logits

    @property
    def scales_hidden(self) -> bool:
        """Whether these scales are put on hidden states, for the GEMM that makes ``grad_weight``."""
        return self.saves_e and self.trained

    @property
    def second_bytes(self) -> int:
        """Bytes of a second product for each token of a chunk."""
        if not self.second_hidden_size:
            return 0
        # Logits in fp32 are counted here for both products, since chunk_logits is the gradient then.
        number = 4 + 4 * (self.itemsize < 4) if self.logits_in_fp32 else self.second_itemsize
        gathered = self.second_itemsize * self.second_hidden_size if self.num_parts > 1 else 0
        return number * self.num_rows + gathered + SECOND_TOKEN_BYTES


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


def memory_of(
    inputs: PlanInputs, cut: Cut, stored_chunks: int, in_forward: bool, wgrad_at_once: bool, *, backward: bool
) -> Memory:
    """The peak of a forward, or of a backward: how many buffers there are of each kind, times their bytes.

    Over several ranks a forward merges a chunk's statistics under the next chunk's GEMM: buffers that are
    read after the merge exist twice. A backward begins with the last chunk, whose gathered hidden states the
    forward left. With ``in_forward`` it makes the gradients again, for an upstream gradient that is not what
    was promised: those made in the forward are gone, those of the head's other uses wait.
    """
    count, ranks, uses, gathers = cut.count, inputs.tp_size, inputs.uses_in_flight, inputs.num_parts > 1
    exp, second, scales = (
        inputs.logits_backend == "scaled_exp",
        inputs.second_hidden_size > 0,
        inputs.scales_hidden,
    )
    again = stored_chunks < count  # the backward computes some logits again
    read = count if inputs.trained else count - stored_chunks  # chunks whose hidden states it reads
    left = 0 if in_forward or inputs.promise_broken else min(read, 1)  # of these, gathered by the forward
    logits = gradients = sums = hidden = rows = tiles = merges = second_copies = 0
    if backward:
        logits, gradients = int(again), int(again or not inputs.saves_e)
        sums = sums_grad_weight(inputs, min(count, 1) if wgrad_at_once else count) + (uses - 1) * in_forward
        second_copies = uses * again
        if wgrad_at_once:
            # Scaled rows of all tokens; and a chunk's grad_hidden is reduced beside the next one's.
            rows, hidden = inputs.num_tokens, (min(count, 2) + left * uses) * gathers
        elif gathers:
            # The chunk that was left takes no other buffer, unless its rows are scaled.
            hidden = min(read if scales and not again else read - left, 2) + 1 + left * uses
        else:
            hidden = int(scales and (stored_chunks > 0 or second))
    else:
        under_way = min(count, 2) if ranks > 1 and not second else 1
        tiles, merges = under_way if in_forward or stored_chunks else 1, under_way
        rows = -(-SAMPLED_ROWS // ranks) * ranks if exp and ranks > 1 and count else 0
        if in_forward:
            logits, gradients, sums = under_way, 1, uses
            hidden = min(count, 3) + 1 if gathers else int(scales)
        else:
            # The scaled-exp GEMM alone writes no E of a chunk that is not stored.
            logits = int(again and (second or not exp))
            hidden = (min(count, 2) + (uses - 1) * left) * gathers

    tokens, capacity, num_rows = inputs.num_tokens, inputs.num_parts * cut.longest, inputs.num_rows
    itemsize, stored_itemsize, labels = inputs.itemsize, inputs.stored_itemsize, inputs.labels_per_token
    on_gpu, entries = inputs.device != "cpu", capacity * num_rows
    if logits and itemsize == stored_itemsize:
        gradients = 0  # they take the logits' place
    rounding = ROUNDING_BYTES if on_gpu and stored_itemsize * entries >= ROUNDED_FROM else 0
    stored = stored_itemsize * num_rows * inputs.num_parts * cut.tokens_of(stored_chunks)
    # A sum and a maximum of each token and tile (fp32), and one sum more if logits are saved.
    tile = (12 if inputs.saves_logits else 8) * -(-num_rows // TILE_COLUMNS) if exp else 0
    merge = SHARD_BYTES * (4 if second else 1) * (1 + ranks) if ranks > 1 else 0
    second_hidden = inputs.second_itemsize * inputs.second_hidden_size * (tokens // inputs.num_parts)
    return Memory(
        chunk_logits=(logits * stored_itemsize + gradients * itemsize) * entries
        + (logits + gradients) * rounding,
        stored_logits=uses * (stored + stored_chunks * rounding),
        grad_weight_sum=sums * 4 * num_rows * inputs.hidden_size * inputs.trained,
        hidden_states=itemsize * inputs.hidden_size * (hidden * capacity + rows),
        tile_statistics=tiles * tile * capacity,
        second_product=(inputs.second_bytes * capacity if again or not backward else 0)
        + second_copies * second_hidden,
        token_floats=(TOKEN_BYTES + LABEL_BYTES * labels) * tokens * uses
        + (CHUNK_TOKEN_BYTES + CHUNK_LABEL_BYTES * labels + merges * merge) * capacity,
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
