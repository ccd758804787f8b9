"""ModelOpt's distillation: the divergence of student and teacher without the logits of either.

Megatron-LM (``--export-kd-teacher-load``, since 0.16) and Megatron-Bridge join a student and its teacher by
ModelOpt's ``mtd.convert``. Forward hooks then keep what both output layers return, and the loss function's
``compute_kd_loss`` hands it to a loss of ModelOpt's, by default ``LogitsKLLoss``. Both stacks end their
set-up with ``adjust_distillation_model_for_mcore``, where models, hooks and loss are known: there the two
heads are joined, or the log says why not. Calls of joined heads give ModelOpt's hooks deferred logits, from
which ``LogitsKLLoss`` computes the divergence. Any other use of them makes real logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fused_ce.adapter import (
    arguments,
    caller,
    deferred_logits,
    language_module,
    report,
    say,
    stock_path,
)
from megatron_fused_ce.adapter.deferred_logits import DeferredLogits
from megatron_fused_ce.adapter.forms import name_of
from megatron_fused_ce.adapter.import_hook import replace_everywhere
from megatron_fused_ce.adapter.switch import active_config


def patch(module: Any) -> None:
    """Wrap the end of ModelOpt's set-up, and ``LogitsKLLoss``."""
    stock_adjust = getattr(module, "adjust_distillation_model_for_mcore", None)
    loss_class = getattr(module, "LogitsKLLoss", None)
    if stock_adjust is None or loss_class is None:
        return  # the heads stay with Megatron, which the log has said where they were built
    stock_forward = loss_class.forward

    @wraps(stock_adjust)
    def adjust_distillation_model_for_mcore(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock_adjust(model, *args, **kwargs)
        if active_config() is not None and getattr(model, "post_process", False):
            _join(model, loss_class, stock_forward)
        return made

    @wraps(stock_forward)
    def forward(self: Any, predictions: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        student, teacher = _deferred(predictions), _deferred(targets)
        if student is not None and teacher is not None and not args and not kwargs:
            known = divergence_of(self, loss_class, stock_forward)
            why = _why_not_comparable(student, teacher)
            if known is not None and not why:
                loss = student.divergence(teacher, *known)
                # Whole on every rank, where ModelOpt's own is this rank's part of a sum.
                return self.post_forward(loss.t(), tp_reduce=False)
            why = why or "it is no longer a divergence that this package knows"
            say.once(student.call.layer.tp_group, f"{loss_class.__name__} takes real logits: {why}")
        predictions, targets = deferred_logits.real((predictions, targets))
        return stock_forward(self, predictions, targets, *args, **kwargs)

    replace_everywhere(module, "adjust_distillation_model_for_mcore", adjust_distillation_model_for_mcore)
    loss_class.forward = forward


def _deferred(captured: Any) -> DeferredLogits | None:
    """Return the deferred logits that a hook captured (logits and bias), else None."""
    logits = captured[0] if isinstance(captured, tuple) and captured else None
    return logits if isinstance(logits, DeferredLogits) and not logits.is_real else None


def _why_not_comparable(student: DeferredLogits, teacher: DeferredLogits) -> str:
    """Why the divergence of two heads' logits needs real ones; empty if it does not."""
    if student.shape != teacher.shape:
        return (
            f"the student's would be {tuple(student.shape)} and the teacher's {tuple(teacher.shape)} on this "
            "rank: the same tokens and one cut of the vocabulary are compared"
        )
    both_joined = all(getattr(side.call.layer, "fused_ce_joined", False) for side in (student, teacher))
    return "" if both_joined else "they are not a student's and its teacher's"


def _join(model: Any, loss_class: Any, stock_forward: Callable[..., Any]) -> None:
    """Adopt the heads of a student and its teacher, and let ModelOpt's hooks keep deferred logits.

    Raises:
        ValueError: an option of the loss is on, which ModelOpt's does not know.
    """
    config = active_config()
    assert config is not None
    stock_path.refuse_options(config, stock_path.OF_DISTILLATION)
    reason = _why_not_joined(model, loss_class, stock_forward)
    if reason:
        report.left_to_megatron(model, f"distillation: {reason}")
        return
    for side in (model, model.teacher_model):
        if getattr(side, language_module.ADOPTED, None) is None:
            language_module.adopt_output_layer(side, config, joined=True)
        side.output_layer.fused_ce_joined = True


def _why_not_joined(model: Any, loss_class: Any, stock_forward: Callable[..., Any]) -> str:
    """Why the heads of a student and its teacher stay with Megatron; empty if they are joined."""
    from megatron_fused_ce.adapter.output_layer import ColumnParallelLinear

    teacher = model.teacher_model
    layers = model.output_layer, teacher.output_layer
    losses = {pair: loss for pair, loss in model._layers_to_loss.items() if set(pair) & set(layers)}
    if list(losses) != [layers]:
        return "ModelOpt does not compare the output layer of the student with the teacher's, and these alone"
    (loss,) = losses.values()
    if type(loss) is not loss_class or "forward" in vars(loss):
        return f"{type(loss).__name__} takes real logits"
    if divergence_of(loss, loss_class, stock_forward) is None:
        return f"{loss_class.__name__} of this ModelOpt is no divergence that this package knows"
    for name, side in (("student", model), ("teacher", teacher)):
        own = side.compute_language_model_loss
        if getattr(own, "__module__", None) == loss_class.__module__:
            caller.learn_loss(own)  # it hands the logits on, or leaves them alone
        if getattr(side, language_module.ADOPTED, None) is None:
            reason = stock_path.reason_at_build(side, arguments.megatron_args(), joined=True)
            if reason:
                return f"of the {name}, {reason}"
        elif not isinstance(side.output_layer, ColumnParallelLinear):
            return f"of the {name}, the output layer is {name_of(type(side.output_layer))} by now"
    group = layers[0].tp_group
    if layers[1].tp_group is not group and max(layer.tp_group.size() for layer in layers) > 1:
        return "student and teacher are tensor-parallel over different groups"
    if loss._config.tensor_model_parallel_size != group.size():
        return f"{loss_class.__name__} expects another tensor-parallel size than that of the output layers"
    return ""


def divergence_of(loss: Any, loss_class: Any, stock_forward: Callable[..., Any]) -> tuple[str, float] | None:
    """Kind and temperature of the divergence that ``LogitsKLLoss`` computes; None for another loss.

    By what it makes of numbers, at every call: a temperature may be a tensor, and the loss may be changed.
    """
    methods = [getattr(loss, name, None) for name in ("forward", "pre_forward", "post_forward")]
    modules = {type(loss).__module__, *(getattr(method, "__module__", "") for method in methods)}
    if type(loss) is not loss_class or modules != {loss_class.__module__}:
        return None  # somebody's, who may do what few numbers do not show
    alone = copy.copy(loss)
    alone._config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    student = torch.linspace(-3.0, 5.0, 30, device="cpu").sin().mul(4).view(2, 3, 5)
    teacher = student.flip(0, 2).mul(0.75)
    try:
        temperature = float(loss._temperature)
        with torch.no_grad():
            made, tp_reduce, is_sequence_parallel = stock_forward(alone, (student, None), (teacher, None))
    except Exception:  # of a loss that is another one
        return None
    log_s, log_t = ((x.double() / temperature).log_softmax(-1) for x in (student, teacher))
    expected = {
        "forward_kl": (log_t.exp() * (log_t - log_s)).sum(-1).t(),
        "reverse_kl": (log_s.exp() * (log_s - log_t)).sum(-1).t(),
    }
    if not tp_reduce or is_sequence_parallel:
        return None
    for kind, values in expected.items():
        if made.shape == values.shape and torch.allclose(made.double(), values, rtol=1e-4, atol=1e-6):
            return kind, temperature
    return None
