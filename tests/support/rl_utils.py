"""A caller with the steps of ``megatron.rl.rl_utils``, which megatron-core's wheel does not have."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Log-softmax ``[b, n]`` of logits ``[b, n, V]`` at ``index`` ``[b, n]``, in the logits' dtype."""
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


def get_logprobs(model: Any, tokens: Tensor, positions: Tensor, no_grad: bool = False) -> Tensor:
    """``[b, s - 1]`` on the last stage of a pipeline, hidden states on the others.

    Of fewer positions than tokens, which is a part of the context, log-probabilities of them all.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    own_dtype = {"fp32_output": False} if any(isinstance(m, Float16Module) for m in model.modules()) else {}
    # The log-softmax is outside, as Megatron's is.
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        ids, labels = tokens[:, : positions.shape[1]], tokens[:, 1 : positions.shape[1] + 1]
        logits = model(ids, positions, None, runtime_gather_output=True, **own_dtype)
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return logits
    return selective_log_softmax(logits[:, : labels.shape[1], :], labels)


@contextlib.contextmanager
def patched_caller(is_known: bool = True, log_softmax: Any = None) -> Iterator[None]:
    """The functions above as the import hook leaves Megatron's, of forms that are known or not;
    ``log_softmax``: a user's that stood there before."""
    from megatron_fused_ce.adapter import forms, import_hook, rl_logprobs

    this = sys.modules[__name__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this, "get_logprobs", get_logprobs)  # which puts it back in the end
        patch.setattr(this, "selective_log_softmax", log_softmax or selective_log_softmax)
        patch.setitem(sys.modules, forms.RL, this)
        patch.setattr(this, import_hook._MARK, True, raising=False)
        if is_known:
            written = dict(forms.definitions(ast.parse(Path(__file__).read_text())))
            form = forms.digest(written["selective_log_softmax"])
            patch.setitem(forms.FORMS, (forms.RL, "selective_log_softmax"), [form])
        rl_logprobs.patch(this)
        yield
