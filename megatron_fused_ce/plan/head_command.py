"""``python -m megatron_fused_ce plan-head``: strategy and chunks of one head."""

from __future__ import annotations

from megatron_fused_ce.cli.command_line import Parser, UsageError, command, whole
from megatron_fused_ce.config import STRATEGY_CHOICES, FusedCEConfig
from megatron_fused_ce.planner.choose import alternatives, budget_bytes, plan
from megatron_fused_ce.planner.memory import ITEMSIZES, LOGITS_BACKENDS, MIB, WGRAD_ACCUMULATORS, PlanInputs

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@command("plan-head")
def main(words: list[str]) -> int:
    """Print the plan for the arguments, and what else there was to choose from."""
    text = "Choose strategy and chunks for a head, as a training run would."
    parser = Parser("python -m megatron_fused_ce plan-head", text)
    add, size = parser.add_argument, whole()
    add("--tokens", type=size, required=True, help="T: tokens of a micro-batch over the TP group")
    add("--hidden", type=size, required=True, help="H: hidden size")
    add("--vocab", type=size, required=True, help="vocabulary of the model, padded as it is trained")
    add("--tp", type=whole(most=10**5), default=1, help="ranks of the tensor-parallel group")
    add("--sequence-parallel", action="store_true")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--memory-mb", type=size, help="budget in MiB (--fused-ce-memory-mb)")
    add("--strategy", choices=STRATEGY_CHOICES, default="auto")
    add("--num-chunks", type=size)
    add("--chunk-tokens", type=size)
    add("--wgrad-accumulator", choices=WGRAD_ACCUMULATORS, default="main_grad",
        help="where grad_weight ends")  # fmt: skip
    add("--no-token-weights", action="store_true",
        help="the forward gets none (in Megatron: no loss_mask), so no grad_in_forward")  # fmt: skip
    add("--logits-backend", choices=LOGITS_BACKENDS, help="[scaled_exp in bf16, gemm_rows otherwise]")
    add("--teacher-hidden", type=size, default=0,
        help="H_t: hidden size of a frozen teacher beside the head (fused_linear_distillation)")  # fmt: skip
    add("--device", default="NVIDIA H200", help="as torch.cuda.get_device_name() says, or cpu")
    add("--mtp-num-layers", type=whole(0, 1000), default=0, help="depths of multi-token prediction")
    given = parser.parse_args(words)
    dtype, teacher = DTYPES[given.dtype], given.teacher_hidden
    backend = given.logits_backend or ("scaled_exp" if given.dtype == "bf16" else "gemm_rows")
    options = {name: getattr(given, name) for name in ("strategy", "num_chunks", "chunk_tokens", "memory_mb")}
    try:
        inputs = PlanInputs(
            given.tokens, given.hidden, -(-given.vocab // given.tp), dtype=dtype, tp_size=given.tp,
            num_parts=given.tp if given.sequence_parallel else 1, wgrad_accumulator=given.wgrad_accumulator,
            token_weights_known=not given.no_token_weights, logits_backend=backend, device=given.device,
            saves_logits=bool(teacher) and backend == "scaled_exp",  # of a teacher in the student's dtype
            second_hidden_size=teacher, second_itemsize=ITEMSIZES[dtype] if teacher else 0,
            config=FusedCEConfig(**options), uses_in_flight=1 + given.mtp_num_layers,
        )  # fmt: skip
        chosen = plan(inputs)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(f"{chosen.strategy}, {chosen.chunks_in_words}: {chosen.why}")
    print("\npredicted peak beside inputs, grad_hidden and the wgrad accumulator:")
    for name, num_bytes in (*chosen.memory._asdict().items(), ("total", chosen.memory.total)):
        if num_bytes:
            print(f"  {name.replace('_', ' '):21} {num_bytes / MIB:10.1f} MiB")
    print(f"\n  {'strategy':20} {'chunks':>6} {'tokens':>7} {'stored':>6} {'MiB':>9} {'time':>6}")
    budget = budget_bytes(inputs)
    for option in alternatives(inputs):
        remark = ""
        if option.predicted_peak_bytes > budget:
            remark = "  over the budget"
        elif option.strategy == "grad_in_forward" and given.no_token_weights:
            remark = "  needs token weights"
        print(
            f"{'*' if chosen == option else ' '} {option.strategy:20} {option.count:6} {option.capacity:7} "
            f"{option.stored_chunks:6} {option.predicted_peak_bytes / MIB:9.1f} "
            f"{option.relative_time:6.3f}{remark}"
        )
    needs = "" if given.memory_mb else ", what grad_in_forward needs"
    gemms = "three bare GEMMs"
    if teacher:
        gemms = "four bare GEMMs (two of logits, two of gradients; recompute takes six)"
    print("\n*: chosen; tokens: of a chunk; stored: chunks whose logits are kept; MiB: the predicted peak,")
    print(f"budget {budget // MIB} MiB{needs}; time: over {gemms}, predicted for {given.device} (--device)")
    return 0
