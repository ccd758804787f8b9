"""Which files the mechanical mutants are drawn from, how many, and the tests that each has to fail."""

from __future__ import annotations

from tests.mutation.faults import (
    ADAPTER,
    BROKEN,
    CALLS,
    HEAD,
    MASKED,
    MODELS,
    OP,
    OPTIONS,
    OUTPUTS,
    PACKAGE,
    PROMISE,
    PROPERTIES,
    ROWS,
    SCALED_EXP,
    STOCK,
    WEIGHTS,
)
from tests.mutation.mutants import Area

AGAINST_FP64 = (
    f"{OP} {OPTIONS} {OUTPUTS} -k 'not triton and not in_a_graph'",
    f"{PROPERTIES} -k statistics_of_shards_merge",
)
CALL = "tests/op/test_call.py"
AGREEMENT = "tests/parallel/test_agreement.py"
MOVED = "tests/parallel/test_moved_bytes.py"
LOOPS = (
    f"{OP} {MASKED} -k 'not sharded_operands'",
    f"{SCALED_EXP} -k few_tokens",
    HEAD,
    f"{CALLS} -k '2ranks and (at_their or frozen or ahead or argmax or other_results)'",
    f"{OUTPUTS} -k fp16",
    f"{MOVED} -k 2ranks",
    "tests/parallel/test_memory.py -k '2ranks and recompute'",
)

AREAS = (
    Area(
        "call",
        20,
        {
            f"{PACKAGE}/call.py": (
                f"{CALL} {OP} {MASKED}",
                f"{CALLS} -k '2ranks and (one_rank or other_shards or argmax)'",
                HEAD,
                f"{AGREEMENT} -k 2ranks",
            )
        },
    ),
    Area(
        "maths",
        40,
        {
            f"{PACKAGE}/loss.py": (*AGAINST_FP64, f"{ROWS} -k 'token_kernels or merged_shards'"),
            f"{PACKAGE}/logits/rows_torch.py": (*AGAINST_FP64, f"{ROWS} -k 'infinities or argmax'"),
            f"{PACKAGE}/loss_form.py": AGAINST_FP64,
            f"{PACKAGE}/scaling.py": AGAINST_FP64,
            f"{PACKAGE}/logits/choose.py": (
                f"{OP} {OUTPUTS} -k 'not triton'",
                f"{SCALED_EXP} -k 'few_tokens or why_not or by_name or cannot_load'",
            ),
        },
    ),
    Area(
        "merge",
        20,
        {
            f"{PACKAGE}/parallel.py": (
                f"{CALLS} -k '2ranks and not (nats or outlier or nan or at_their)'",
                HEAD,
                f"{OUTPUTS} -k 'all_outputs_against_fp64 and plain and not triton'",
                "tests/op/test_second_device.py -k side_stream",
                MOVED,
            )
        },
    ),
    Area(
        "loops",
        25,
        {
            f"{PACKAGE}/autograd.py": LOOPS,
            f"{PACKAGE}/forward.py": LOOPS,
            f"{PACKAGE}/backward.py": LOOPS,
            f"{PACKAGE}/chunking.py": LOOPS,
        },
    ),
    Area(
        "promise",
        15,
        {
            f"{PACKAGE}/promise.py": (PROMISE, f"{BROKEN} -k 'one_rank_alone or said'"),
            f"{PACKAGE}/masked_tokens.py": (MASKED,),
        },
    ),
    Area(
        "adapter",
        30,
        {
            f"{PACKAGE}/adapter/{name}.py": (
                f"{ADAPTER} {WEIGHTS} {STOCK}",
                f"{MODELS} -k '2ranks and not hybrid'",
                f"{BROKEN} -k 'dp-2ranks or said'",
            )
            for name in (
                "stock_path",
                "token_weights",
                "main_grad",
                "deferred_logits",
                "output_layer",
                "language_module",
            )
        },
    ),
)
