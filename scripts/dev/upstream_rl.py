"""The pytest plugin of scripts/dev/upstream_tests.py for RL frameworks: what replaces their functions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.adapter.switch import counters
from megatron_fused_ce.rl import masked_token_log_probs, token_log_probs


def pytest_configure(config: pytest.Config) -> None:
    # verl's tests compare with it; verl's plain PyTorch, used without it, does not take their labels.
    flash: Any = ModuleType("flash_attn.ops.triton.cross_entropy")
    flash.cross_entropy_loss = lambda *pair, **_: (cross_entropy(pair[0], pair[1], reduction="none"), None)
    sys.modules[flash.__name__] = flash
    if config.getoption("--fused-ce-hook") == "on":
        REPLACE[config.getoption("--fused-ce-project")]()


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> list[Any] | None:
    """Tests of what pytest does not collect; over several ranks nothing else, but for NeMo-RL's."""
    here = int(os.environ.get("WORLD_SIZE", "1"))
    ranks, cases = CASES.get(name, (0, None))
    if cases is None:
        runs_on_more = collector.config.getoption("--fused-ce-project") == "nemo_rl"
        return None if here == 1 or runs_on_more else []
    made = enumerate(cases(obj) if ranks == here else [])
    return [pytest.Function.from_parent(collector, name=f"{name}[{at}]", callobj=case) for at, case in made]


@pytest.fixture
def distributed_test_runner() -> Callable[..., None]:
    """NeMo-RL's starts processes, which would import NeMo-RL's functions: here torchrun's are the ranks."""

    def run(test: Callable[[int, int], None], world_size: int) -> None:
        here = int(os.environ.get("WORLD_SIZE", "1"))
        if here != world_size:
            pytest.skip(f"{world_size} ranks")
        if not dist.is_initialized():
            dist.init_process_group("nccl")
            torch.cuda.set_device(dist.get_rank())
        test(dist.get_rank(), here)

    return run


def _skyrl() -> None:
    def log_probs(hidden: Any, weight: Any, target: Any, start: int, end: int, *others: Any) -> Any:
        """As SkyRL's, of hidden states [B, S, H]; grad_hidden is this rank's part."""
        counters().fused += 1
        *_, group, inference_only = others  # before them a chunk's length
        options: dict[str, Any] = {"batch_first": True, "zero_unknown": True, "reduce_grad_hidden": False}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            head = hidden, weight, target
            return token_log_probs(*head, **options, tp_group=group, vocab_start=start).log_prob

    name = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    module: Any = importlib.import_module(name)
    module.FusedLinearChunkedDistributedLogprob = SimpleNamespace(apply=log_probs)


def _slime() -> None:
    module: Any = importlib.import_module("slime.utils.ppo_utils")
    module.calculate_log_probs_and_entropy = _of_logits
    # Spawned processes would import slime's function.
    workers: Any = torch.multiprocessing
    workers.spawn = partial(workers.start_processes, start_method="fork")


def _of_logits(logits: Any, tokens: Any, with_entropy: bool, log_prob_keep_mask: Any, **unused: Any) -> Any:
    """As slime's, of logits and mask [T, V / R]: logits are the hidden states, the weight is the identity."""
    counters().fused += 1
    group: Any = dist.group.WORLD if dist.is_initialized() else None

    def whole(part: Any) -> Any:
        return torch.cat(all_gather(part.contiguous(), group), 1) if group else part

    hidden = whole(logits)  # all_gather's backward sums grad_hidden over the ranks
    weight = torch.eye(hidden.shape[1]).split(logits.shape[1])[group.rank() if group else 0]
    head = hidden.unsqueeze(1), weight, tokens.unsqueeze(0)
    entropy = "differentiable" if with_entropy else "none"
    log_prob, entropies, _ = token_log_probs(*head, entropy=entropy, tp_group=group, reduce_grad_hidden=False)
    if log_prob_keep_mask is not None:
        kept = whole(log_prob_keep_mask.float()).bool().scatter(1, tokens.unsqueeze(1), True)
        ids, offsets = kept.nonzero()[:, 1], torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        log_prob, *_ = masked_token_log_probs(*head, ids, offsets, tp_group=group, reduce_grad_hidden=False)
    log_prob = log_prob[0].unsqueeze(-1) if len(tokens) else log_prob[0]
    return log_prob, None if entropies is None else entropies[0]


def _verl() -> None:
    def log_probs(hidden: Any, weight: Any, labels: Any, temperature: float, *others: Any) -> Any:
        counters().fused += 1
        options: dict[str, Any] = {"temperature": temperature, "entropy": "differentiable"}
        options |= {"tp_group": others[1] if others else None, "reduce_grad_hidden": False}
        options |= {"config": FusedCEConfig(logit_precision="fp32")}  # as verl's
        rows = hidden.reshape(-1, 1, hidden.shape[-1])
        made = token_log_probs(rows, weight, labels.reshape(1, -1), **options)
        return tuple(values.flatten() for values in made if values is not None)

    module: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    module.linear_cross_entropy = log_probs


def _nemo_rl() -> None:
    module: Any = importlib.import_module("nemo_rl.distributed.model_utils")

    def log_probs(logits: Any, target: Any, start: int, end: int, *others: Any) -> Any:
        """Of logits [B, S, V / R], which are the hidden states; the weight is the identity."""
        counters().fused += 1
        *_, group, inference_only = others  # before them a chunk's length
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.detach().contiguous(), group=group)
        parts[group.rank()] = logits  # each rank's grad_hidden is whole: no sum over ranks
        hidden = torch.cat(parts, -1).float()
        weight = torch.eye(hidden.shape[-1], device=hidden.device)[start:end]
        options: dict[str, Any] = {"batch_first": True, "zero_unknown": True}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            head = hidden, weight, target
            return token_log_probs(*head, **options, tp_group=group, vocab_start=start).log_prob

    module.DistributedLogprob = module.ChunkedDistributedLogprob = SimpleNamespace(apply=log_probs)


REPLACE = {"nemo_rl": _nemo_rl, "skyrl": _skyrl, "slime": _slime, "verl": _verl}


def _verl_tp(of: Any) -> list[Callable[[], object]]:
    test = cache(of)  # it joins the process group

    def verify(size: int) -> None:
        test().initialize(size)
        test().verify_kernel_correctness(2)

    return [partial(verify, size) for size in range(5)]


#: Classes and functions that pytest does not collect: on how many ranks, and their tests.
CASES: dict[str, tuple[int, Callable[[Any], list[Callable[[], object]]]]] = {
    "_distributed_main": (2, lambda main: [main]),
    "TestLinearCrossEntropy": (
        1,
        lambda of: [partial(lambda size: of(size).verify_correctness(2), size) for size in range(5)],
    ),
    "TestLinearCrossEntropy_TensorParallel": (2, _verl_tp),
    # Memory of NeMo-RL's chunks.
    "test_get_next_token_logprobs_chunking_reduces_memory": (0, lambda of: []),
}
