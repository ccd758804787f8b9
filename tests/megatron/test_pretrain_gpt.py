"""Unmodified pretrain_gpt.py of a real Megatron-LM on a CPU, flag off and on.

    MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/megatron/test_pretrain_gpt.py

Several checkouts: separate them with ``:``. Without one everything here is skipped.
"""

from __future__ import annotations

import math

import pytest

from megatron_fused_ce.scripts.lib import logs as megatron_logs
from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, STOCK, UNTIED
from megatron_fused_ce.scripts.runs import pretrain
from tests.megatron.launches import BASE_ARGS, by_torchrun, exact_lines, told_by_ranks, words_of
from tests.support.checkouts import on_checkouts

pytestmark = pytest.mark.rest
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DP2 = "--num-layers 2 --tensor-model-parallel-size 1 --no-gradient-reduce-div-fusion"
PP2 = "--pipeline-model-parallel-size 2 --sequence-parallel"
VPP = f"--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 {PP2}"
#: Ranks and arguments. Together: sequence parallelism, tied and untied weights, pipeline stages, gradients
#: that the fused kernel (its stand-in) accumulates and those that it does not.
CASES = {
    "plain": (2, f"--num-layers 2 --sequence-parallel {UNTIED} {NO_FUSED_WGRAD}"),
    "mtp": (2, "--num-layers 2 --mtp-num-layers 1 --sequence-parallel"),
    "distopt": (4, f"--num-layers 2 --sequence-parallel {UNTIED} {OVERLAPS}"),
    "pp2-mtp": (4, f"--num-layers 2 --mtp-num-layers 1 {PP2} {UNTIED}"),
    "vpp": (4, f"{VPP} {OVERLAPS} {NO_FUSED_WGRAD}"),
    "vpp-wgrad": (4, VPP),
    "fsdp": (2, f"{DP2} {UNTIED} {NO_FUSED_WGRAD}"),
}
NUM_HEADS = {"plain": 1, "mtp": 2, "pp2-mtp": 2, "vpp": 1}
NUM_FORWARDS = 5 * 4 + 3 * 4  # iterations and evaluations, of 4 micro-batches each
CHUNKS = "--fused-chunked-ce --fused-ce-num-chunks 3 --fused-ce-strategy"
GRAD_IN_FORWARD = f"{CHUNKS} grad_in_forward"
MEGATRON_FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
    " --data-parallel-sharding-strategy optim_grads_params"
)


def launch(checkout, folder, *flags, case="plain"):
    """What two iterations of a case (plain: TP 2) print, unless ``flags`` say otherwise."""
    ranks, arguments = CASES[case]
    base = f"{BASE_ARGS} {arguments} --train-iters 2 --eval-iters 0".split()
    words = words_of(f"{checkout}/pretrain_gpt.py", *base, *flags)
    settings = {
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if "fsdp" in " ".join(flags) else "1",
        # What --deterministic-mode asks of the environment.
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    status, output = by_torchrun(words, folder, checkout, ranks, **settings)
    assert status == 0, told_by_ranks(output)
    assert ("--defer-embedding-wgrad-compute" in flags) == ("-wgrad-compute has no effect" in output)
    return output


def figures_of(checkout, folder, flags, case="plain"):
    """Five iterations of a case, two evaluations."""
    whole = ("--train-iters", "5", "--eval-iters", "1")
    return megatron_logs.parse_logs([launch(checkout, folder, *whole, *flags.split(), case=case)])


#: A forward runs beside another micro-batch's backward, by a schedule of its own.
COMBINED_1F1B = """
    --overlap-moe-expert-parallel-comm --num-experts 4 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --disable-bias-linear --bf16
"""


@on_checkouts
@pytest.mark.parametrize("case", NUM_HEADS)
def test_pretrain_gpt_flag_off_and_on(checkout, tmp_path, case):
    """Within twice what Megatron's native loss differs by, or what its log can tell apart."""
    stock, native = (figures_of(checkout, tmp_path, flags, case) for flags in ("", STOCK["native"]))
    for strategy in ("recompute", "store", "grad_in_forward"):
        figures = figures_of(checkout, tmp_path, f"{CHUNKS} {strategy}", case)
        assert figures.heads_fused == NUM_HEADS[case] * NUM_FORWARDS
        assert not figures.logits_materialised
        ours, yardstick = (pretrain.differences(one, stock) for one in (figures, native))
        assert ours[0] <= max(1e-6, 2 * yardstick[0]) and ours[1] <= max(1e-5, 2 * yardstick[1])


DEFERRED = "--defer-embedding-wgrad-compute --wgrad-deferral-limit 2"
WGRAD = f"""
    --bf16 --grad-reduce-in-bf16 --use-distributed-optimizer --tensor-model-parallel-size 1
    --overlap-grad-reduce {GRAD_IN_FORWARD}
"""
#: Case, flags of both launches, of the first and of the second alone; heads that the second fuses, and how
#: far losses and gradient norms are apart.
PAIRS = {
    # In bf16, which it asks for: within its rounding.
    "combined 1F1B": ("distopt", COMBINED_1F1B, "", GRAD_IN_FORWARD, NUM_FORWARDS / 2, 5e-4, 1e-2),
    "combined 1F1B, vpp": ("vpp", COMBINED_1F1B, "", GRAD_IN_FORWARD, NUM_FORWARDS, 5e-4, 1e-2),
    # To the bit. The second as Megatron-Bridge's recipes for 70B, 405B and 175B: main_grad in bf16.
    "deferral": ("pp2-mtp", f"{CHUNKS} store", "", DEFERRED, 2 * NUM_FORWARDS, 0, 0),
    "deferral, wgrad": ("vpp-wgrad", WGRAD, "", DEFERRED, NUM_FORWARDS / 2, 0, 0),
    # The head's weight is sharded, against DDP without the flag; each rank has half of the micro-batches.
    "FSDP2": ("fsdp", "", "", f"--use-torch-fsdp2 {CHUNKS} recompute", NUM_FORWARDS / 2, 1e-6, 1e-5),
    "Megatron-FSDP": ("fsdp", "", "", f"{MEGATRON_FSDP} {CHUNKS} recompute", NUM_FORWARDS / 2, 1e-6, 1e-5),
}


@on_checkouts
@pytest.mark.parametrize("name", PAIRS)
def test_pretrain_gpt_in_pairs(checkout, tmp_path, name):
    case, both, *own, heads, losses, norms = PAIRS[name]
    first, second = (figures_of(checkout, tmp_path, f"{both} {flags}", case) for flags in own)
    assert second.heads_fused == heads and not second.logits_materialised
    apart = pretrain.differences(second, first)
    assert apart[0] <= losses and apart[1] <= norms


@on_checkouts
def test_pretrain_gpt_with_options_of_the_loss(tmp_path, checkout):
    """127 words padded to 256 at TP 2: the second rank has no column of them."""

    def losses(*flags):
        """Of two iterations, every digit, and what the launch printed."""
        output = launch(checkout, tmp_path, *flags)
        return [line["lm loss"] for line in exact_lines(output)], " ".join(output.split())

    stock, _ = losses()
    flag, _ = losses("--fused-chunked-ce")
    assert flag == pytest.approx(stock, rel=1e-6) and len(stock) == 2
    assert losses("--fused-chunked-ce", "--deterministic-mode")[0] == flag
    for strategy in ("store", "grad_in_forward", "recompute"):
        flags = f"--fused-chunked-ce --fused-ce-mask-padded-vocab --fused-ce-strategy {strategy}"
        masked, output = losses(*flags.split())
        assert "loss with true_vocab_size" in output
        # Logits of an untrained model are nearly equal.
        assert stock[0] - masked[0] == pytest.approx(math.log(256 / 127), abs=0.03)
        assert masked[1] < masked[0]
    all_of_them = "--fused-ce-label-smoothing 0.1 --fused-ce-z-loss 1e-2 --fused-ce-logit-softcap 5"
    changed, output = losses("--fused-chunked-ce", *all_of_them.split())
    assert "loss with label_smoothing, z_loss, logit_softcap" in output.replace("[fused-ce] ", "")
    assert changed[0] - stock[0] == pytest.approx(1e-2 * math.log(256) ** 2, abs=0.1)


@on_checkouts
def test_pretrain_gpt_in_fp16_skips_the_same_steps(tmp_path, checkout):
    """From a loss scale that overflows, until it does not."""
    fp16 = ["--fp16", "--initial-loss-scale", "8388608", "--hysteresis", "1", "--train-iters", "10"]
    off, *on = (
        megatron_logs.parse_logs([launch(checkout, tmp_path, *fp16, *flags)])
        for flags in ([], ["--fused-chunked-ce"], GRAD_IN_FORWARD.split())
    )
    assert off.skipped and len(off.losses["lm loss"]) >= 3, "nothing was skipped, or all was"
    for figures in on:
        assert figures.heads_fused and figures.skipped == off.skipped
        assert figures.losses["lm loss"] == pytest.approx(off.losses["lm loss"], rel=1e-4)
