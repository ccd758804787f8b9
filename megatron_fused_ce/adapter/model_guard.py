"""One guard per model; a mismatch on one rank reaches all ranks of the model before any of them steps.

The rank with the head finds a mismatch. Pipeline stages without a head, and data-parallel replicas whose
gradients were summed with the wrong ones, would still step. So a patched ``finalize_model_grads``, which all
ranks of a model run once a step, all-reduces one int. Every rank's optimizers then read the result and raise
(:mod:`.grad_guard`, :mod:`.optimizer_guard`). NaN or Megatron's found-inf would not suffice: the first is
noticed only with gradient clipping, the second only in fp16, and neither reaches all ranks.

The ranks agree once, at a model's first ``finalize_model_grads``, on whether any of them uses a strategy or
option that can mismatch. If none does there is no later all-reduce, and ``auto`` no longer takes
``grad_in_forward`` for this model.

In a launch that replaces ``finalize_model_grads`` without calling Megatron's, only the rank with the head
stops.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_fused_ce import vocab_parallel
from megatron_fused_ce.adapter import switch
from megatron_fused_ce.adapter.rl_stacks import replace_everywhere
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.grad_guard import Guard

HOOK_POINT = "finalize_model_grads"

_of_layer: WeakKeyDictionary[nn.Module, Guard] = WeakKeyDictionary()


class _Model:
    """A model given to ``finalize_model_grads``: the guards of its heads, or its own without a head."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        parts = {id(module) for chunk in chunks for module in chunk.modules()}
        self.guards = [guard for layer, guard in _of_layer.items() if id(layer) in parts]
        for guard in self.guards:
            guard.set_modules(chunks)
        if not self.guards:
            self.guards = [Guard("a head on another rank (of another pipeline stage)", chunks)]
        #: Whether any rank's head can mismatch; None until the ranks have compared.
        self.used: bool | None = None


_models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()


def guard_of(layer: nn.Module) -> Guard:
    """The guard of the model with this output layer; that of all models if unknown (a copied layer)."""
    if layer not in _of_layer:
        _of_layer[layer] = Guard(f"a copy of {type(layer).__name__}")
    return _of_layer[layer]


def adopt(model: nn.Module, layer: nn.Module, config: FusedCEConfig) -> None:
    """Give the model that holds ``layer`` a guard."""
    guard = _of_layer[layer] = Guard(f"the head of {type(model).__name__}", [model])
    guard.expected = config.strategy == "grad_in_forward" or config.skip_masked


def patch(module: ModuleType) -> None:
    """Wrap ``finalize_model_grads``, also in modules that imported it by name before."""
    stock = getattr(module, HOOK_POINT, None)
    if stock is None or "model" not in inspect.signature(stock).parameters:
        return
    signature = inspect.signature(stock)

    @wraps(stock)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tell_all_ranks(given["model"], given.get("pg_collection"))
        return result

    replace_everywhere(module, HOOK_POINT, finalize_model_grads)


def tell_all_ranks(chunks: Sequence[nn.Module], groups: Any) -> None:
    """Spread a mismatch on any rank of the model to all its ranks. The host does not wait.

    Collectives, only in a launch with the fused head: one MAX all-reduce of an int32 over all ranks if the
    model is on all of them, else one each over its tensor-, pipeline- and data-parallel groups, in this
    order. Before the first, the same once to find out whether they are needed; the host waits for that one.
    If they are not needed, no more.

    Args:
        chunks: the model chunks of this rank, as given to ``finalize_model_grads``.
        groups: the ``pg_collection`` it was given, or None for Megatron's parallel state.
    """
    model = _models.get(chunks[0])
    if model is None:
        if not switch.ever_asked_for():
            return
        model = _models[chunks[0]] = _Model(chunks)
    if model.used is False:
        return
    over = vocab_parallel.joining(_axes(groups))
    if not over:
        return
    device = vocab_parallel.collective_device(over[0])
    if model.used is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the host cannot read it in a capture; `Guard.prepare` refuses a first use here
        needed = any(guard.used or guard.expected for guard in model.guards)
        asked = torch.full((1,), int(needed), dtype=torch.int32, device=device)
        model.used = bool(_largest(asked, over))
        for guard in model.guards:
            guard.allowed = model.used
    if not model.used:
        return
    found = torch.cat([guard.mismatch_on(device) for guard in model.guards]).amax(0, keepdim=True)
    found = _largest(found, over).bool()
    for guard in model.guards:
        guard.record_mismatch(found)


def _largest(value: Tensor, groups: Sequence[Any]) -> Tensor:
    for group in groups:
        value = vocab_parallel.largest_over_ranks(value, group)
    return value


def _axes(given: Any) -> list[Any]:
    """The groups of this rank along each axis of the grid of a model's ranks."""
    if given is None:
        from megatron.core import parallel_state

        return [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        ]
    # With GTP (0.19) the ranks that hold a weight's parts see other tokens too.
    replicas = getattr(given, "dp_cp_gtp_remat", None) or given.dp_cp
    pipelines = given.pp if isinstance(given.pp, list) else [given.pp]
    return [given.tp, *pipelines, replicas]
