"""``python -m megatron_fused_ce plan``: launches that it reads, what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import megatron_fused_ce
from megatron_fused_ce import __main__ as package_command
from megatron_fused_ce.plan import answer, closed_world, command, heads, peaks
from megatron_fused_ce.plan.answer import sentences
from megatron_fused_ce.plan.command import plan_of, setting_of
from megatron_fused_ce.plan.named_models import MODELS
from megatron_fused_ce.plan.setting import Recompute
from megatron_fused_ce.scripts.dev import figures_plan as check_plan
from megatron_fused_ce.scripts.dev import megatron_arguments as megatron_arguments_script
from megatron_fused_ce.scripts.dev import megatron_records
from tests.support.checkouts import on_checkouts

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128"
EXAMPLES = sorted(path for path in (ROOT / "scripts" / "examples").glob("*.sh") if path.stem != "launch")


# --- launches: tests/plan/launch_scripts.txt has what is read of scripts ------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_planned_and_have_the_models_size(example):
    """GPUs and parameters are those that tests/tools/test_examples.py finds through Megatron's own parser."""
    from tests.support.launches import LAUNCHES

    found, known = plan_of(["--from-launch", str(example)]), LAUNCHES[example.stem]
    parallel = found.setting.parallel
    assert (parallel.gpus, parallel.data) == (known["gpus"], known["data_parallel"])
    if known["billions"]:
        alone = replace(found.setting, vocab_divisor=1)
        assert peaks.parameters(alone) / 1e9 == pytest.approx(known["billions"], rel=1e-3)
    assert found.advice.recommended.verdict == "fits"


def test_nothing_of_a_script_is_run(tmp_path):
    trap, script = tmp_path / "trap", tmp_path / "train.sh"
    script.write_text(
        f"touch {trap}\nA=$(touch {trap})\nB=`touch {trap}`\nC=$((1+1))\n"
        f'if touch {trap}; then D=1; fi\neval "touch {trap}"\n'
        f"python pretrain_gpt.py {TINY} --save $A\n"
    )
    assert setting_of(["--from-launch", str(script)]).model.num_layers == 2
    assert not trap.exists()


def test_a_launch_as_a_string_and_numbers_behind_it():
    text = f"torchrun --nproc-per-node=4 pretrain_gpt.py {TINY} --tensor-model-parallel-size 2 --bf16"
    one = setting_of(["--from-launch", text, "--seq-length", "256"])
    assert (one.parallel.gpus, one.parallel.tensor, one.parallel.data) == (4, 2, 2)
    assert (one.training.dtype, one.training.sequence) == ("bfloat16", 256)
    # Megatron's defaults, not the usual settings: a mask, dropout, nothing sharded.
    assert one.training.attention_mask and one.training.hidden_dropout
    assert not one.training.distributed_optimizer
    words = ["--model", "llama-3-8b", "--seq-length", "64", "--num-layers", "2"]
    assert setting_of(words).model.num_layers == 2


# --- Megatron's arguments --------------------------------------------------------------------


def tiny(*words: str):
    return setting_of([*shlex.split(TINY), *words])


def test_arguments_become_sizes():
    one = tiny(*shlex.split(
        "--swiglu --group-query-attention --num-query-groups 2 --kv-channels 32 --normalization RMSNorm"
        " --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope"
        " --mtp-num-layers 1 --micro-batch-size 2 --gpus 8 --tp 2 --cp 2 --sequence-parallel"
        " --global-batch-size 16 --recompute-granularity full --recompute-method block"
        " --recompute-num-layers 1 --num-experts 8 --moe-ffn-hidden-size 32 --ep 4 --moe-layer-freq [0]+[1]*1"
    ))  # fmt: skip
    model, parallel, training = one.model, one.parallel, one.training
    assert (model.num_query_groups, model.head_dim, model.ffn_hidden_size) == (2, 32, 128)
    switches = model.gated, model.tied, model.rms_norm, model.linear_bias, model.rotary
    assert switches == (True, False, True, False, True)
    assert (model.learned_positions, model.mtp_num_layers) == (0, 1)
    assert model.mixture.layers == (False, True)
    assert (parallel.data, parallel.context, parallel.sequence_parts) == (2, 2, 2)
    assert training.num_micro_batches == 16 // 2 // 2
    assert training.recompute == Recompute(full=True, num_layers=1, block=True)
    assert one.num_tokens == 2 * 128 // 2
    # Defaults are Megatron's: as many groups as heads, four times the hidden size, learned positions.
    model = tiny("--num-query-groups", "2").model
    assert (model.num_query_groups, model.ffn_hidden_size, model.learned_positions) == (4, 256, 128)
    assert tiny("--num-experts", "8", "--moe-layer-freq", "2").model.mixture.layers == (True, False)


@pytest.mark.parametrize(
    ("layout", "stages", "layers"),
    [
        ("Et*3|(tt|)*29,m|L", 16, [[3, 2]] + [[2, 2]] * 13 + [[2, 0], [2, 0]]),
        ("Et*2|(tt|)*5t|tmL", 4, [[2, 2], [2, 2], [2, 1], [2, 1]]),
        ("Etttt|(t|)*2L", 4, [[4], [1], [1], [0]]),
    ],
)
def test_a_layout_of_the_stages(layout, stages, layers):
    words = ["--num-layers", str(sum(map(sum, layers))), "--pp", str(stages), "--mtp-num-layers", "1"]
    words += ["--pipeline-model-parallel-layout", layout]
    found = peaks.stages(tiny(*words))
    assert [[len(chunk) for chunk in stage.chunks] for stage in found] == layers
    # A stage without layers, or without its last ones, can be planned.
    plan_of([*shlex.split(TINY), *words])


def test_hybrids_by_a_pattern_and_by_the_program():
    sizes = "--hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128 --mamba-head-dim 16"
    one = setting_of(shlex.split(f"--hybrid-layer-pattern M*|-M/*-/*- --pp 2 {sizes}"))
    assert (one.model.num_layers, one.model.pattern, one.model.mtp_num_layers) == (4, "M*-M", 2)
    assert (one.model.prediction_pattern, one.model.state_space.num_heads) == ("*-", 8)
    assert setting_of(["--from-launch", f"pretrain_mamba.py {TINY}"]).model.pattern == "MM"


@pytest.mark.parametrize(
    ("words", "gradient", "state", "step"),
    [
        ("--bf16", 4, 12, 0),
        ("", 4, 8, 0),
        ("--fp16", 2, 12, 4),
        ("--bf16 --grad-reduce-in-bf16", 2, 12, 4),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 4, 7, 0),
    ],
)
def test_bytes_of_a_parameter(words, gradient, state, step):
    found = setting_of(["--from-launch", f"{TINY} {words}"]).training
    assert (found.gradient_bytes, found.state_bytes, found.step_bytes) == (gradient, state, step)


PLAIN = "may change memory and is not counted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fp8-format hybrid", f"--fp8-format {PLAIN}"),
        ("--optimizer=sgd", "--optimizer sgd is not counted"),
        ("--optimizer adam --cuda-graph-impl none --lr 1e-4 --log-throughput --seed 7 --save $OUT", ""),
        ("--seq-lenght 64", "--seq-lenght is none of Megatron's arguments (did you mean --seq-length?)"),
        ("--fused-chuncked-ce", "(did you mean --fused-chunked-ce?)"),
        ("--tp-comm-overlap --squared-relu --zero-stage 2", f"--tp-comm-overlap {PLAIN}"),
        ("--reset-attention-mask", ""),
        ("--load x --num-experts 4", "--load: resumed experts hold more than is counted"),
        ("--num-experts 4 --load <CKPT>", "--load: resumed experts hold more than is counted"),
        ("--cross-entropy-fusion-impl linear", ""),
        ("--cross-entropy-fusion-impl linear --cross-entropy-loss-fusion", "the flag replaces, is not"),
        ("--cross-entropy-fusion-impl linear --cross-entropy-loss-fusion --fused-chunked-ce", ""),
        ("--pipeline-model-parallel-layout Et*2,m|L --pp 2", "prediction before the last stage is not"),
        ("--pipeline-model-parallel-layout Et|t,m,L --pp 2", ""),
        ("--recompute-granularity selective --recompute-modules x", "recomputing x is not counted"),
        ("--num-layers 4 --hybrid-layer-pattern MGDM", "layers of kind D G are not counted"),
        # No effect where another argument holds.
        ("--attention-softmax-in-fp32 --attention-backend unfused", ""),
        ("--attention-softmax-in-fp32 --transformer-impl local --seq-length 30", PLAIN),
        ("--attention-softmax-in-fp32 --transformer-impl local", ""),
        ("--no-bias-gelu-fusion", f"--no-bias-gelu-fusion {PLAIN}"),
        ("--no-bias-gelu-fusion --disable-bias-linear", ""),
        ("--cp-comm-type a2a", ""),
        ("--cp-comm-type a2a --context-parallel-size 2", f"--cp-comm-type {PLAIN}"),
        ("--window-size 128,0", ""),
        ("--window-size 128,0 --attention-backend unfused", f"--window-size {PLAIN}"),
        ("--position-embedding-type mrope", "--position-embedding-type mrope is not counted"),
        ("--step-batch-size-schedule 0:8", ""),
        ("--step-batch-size-schedule 0:8 --pp 2", f"--step-batch-size-schedule {PLAIN}"),
        ("--kv-channels 512", "heads of 512"),
        ("--transformer-impl inference_optimized", "--transformer-impl inference_optimized is not counted"),
    ],
)
def test_what_is_not_counted_takes_the_verdict(words, said):
    launch = ["--from-launch", f"{TINY} --bf16 {words}", "--gpus", "2"]
    found = plan_of(launch)
    assert said in "; ".join(found.doubts) and bool(found.doubts) == bool(said)
    if "layers of kind" in said:
        return
    vouched = [word for name in found.judged.uncounted for word in ("--ignore", name)]
    assert not plan_of([*launch, *vouched]).doubts
    without_dashes = [word if word == "--ignore" else word.lstrip("-") for word in vouched]
    assert not plan_of([*launch, *without_dashes]).doubts
    with pytest.raises(ValueError, match="--ignore nonsense vouches for nothing here"):
        plan_of([*launch, "--ignore", "nonsense"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--tensor-parallel-num-weight-shards 8", "its weight is sharded by gtp_remat"),
        ("--tensor-parallel-num-weight-shards 2 --tp 2", ""),
        ("--fp8-output-proj", "TELMHeadColumnParallelLinear"),
        ("--fp8-output-proj --hybrid-layer-pattern M*", ""),
        ("--logits-load-dir x", "--logits-load-dir (distillation) reads the logits"),
        ("--batch-invariant-mode", "--batch-invariant-mode replaces"),
        ("--save-dgrads-interval 10", "saves the logits or their gradient"),
        ("--save-dgrads-interval 0", ""),
        ("--config-logger-dir x", "writes the logits to disk"),
        ("--output-logit-dtype fp16", "asks for fp16 logits"),
        ("--output-logit-dtype bf16", ""),
        ("--fp8-format hybrid", ""),
    ],
)
def test_what_keeps_the_head_with_megatron_is_no_effect(words, why, capsys):
    """The adapter's reasons, by argument; tests/megatron/test_stock_path.py builds each."""
    launch = ["--from-launch", f"pretrain_hybrid.py {TINY} --bf16 {words}"]
    if "hybrid-layer" not in words:
        launch[1] = launch[1].replace("_hybrid", "_gpt")
    status = command.main(launch)
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"No effect: the head stays on Megatron's own path: {why}"[: 50 if why else 0])
    assert why in out and ("No effect" in out) == bool(why) == ("--fused-chunked-ce," not in out)
    assert status == (0 if why or words.startswith("--tensor") else 3)
    assert (plan_of(launch).decision == "no effect") == bool(why)
    # The adapter stops where Megatron's own loss would leave out an option; here by the same words.
    assert command.main([*launch, "--fused-ce-z-loss", "1e-4"]) == (2 if why else status)
    error = capsys.readouterr().err
    assert error.startswith("plan: the launch stops: z_loss: Megatron's own loss knows") == bool(why)
    assert why in error
    command.main([*launch, "--explain"])
    assert ("The flag would run as" in capsys.readouterr().out) == (not why)
    command.main([*launch, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert why in found["no_effect"] and found["largest_head"] > 0


def test_the_heads_two_numbers_come_first_by_hand():
    """6 bytes a logit and two workspaces; then the larger head of those that auto may take."""
    words = (
        "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --vocab-size 128256 --seq-length 131072"
    )
    found = plan_of(["--from-launch", f"pretrain_gpt.py {words} --bf16 --my-own 1", "--gpus", "1"])
    before = (6 * 131072 * 128256 + 2 * heads.CUBLAS_WORKSPACE) / 2**30
    head = functools.partial(
        heads.plugin_head, found.setting, found.advice.gpu.device, "auto", exp_serves=True
    )
    known, unknown = (head(token_weights_known=there) for there in (True, False))
    assert known.peak < unknown.peak and "grad_in_forward" in known.words
    numbers = f"{before:.2f} → {unknown.peak / 2**30:.2f} GiB a GPU"
    assert sentences(found)[0].text == (
        f"The head (last stage), if the loss is Megatron's own: {numbers}. The whole: no verdict, "
        "--my-own is none of Megatron's arguments."
    )


def test_fp16_with_a_z_loss_makes_no_gradients_in_the_forward():
    """As the run (tests/op/test_promise.py), for which it has no bound."""
    for dtype, words in (("--bf16", "grad_in_forward, 4"), ("--fp16", "recompute, 4")):
        launch = f"{MODELS['llama-3-8b'].arguments} --seq-length 32768 {dtype} --fused-ce-z-loss 1e-4"
        found = plan_of(["--from-launch", launch]).advice
        assert all(found.way(name).head.words.startswith(words) for name in ("auto", "grad_in_forward"))


def test_a_mask_that_is_reset_is_bounded():
    """A byte for each pair of tokens more, at most: the verdict holds with it, or there is none."""
    words = f"{MODELS['llama-3.2-1b'].arguments} --seq-length 32768 --bf16 --recompute-granularity full"
    launch = ["--from-launch", f"{words} --reset-attention-mask", "--gpus", "1"]
    found = plan_of(launch)
    low, high = found.advice.baseline.peak, found.most.baseline.peak
    assert high - low == 32768**2 and not found.doubts
    room = answer.TIGHT * found.advice.baseline.head.largest
    between = ((low + high) / 2 + room) / 2**30 + command.OVERHEAD_GIB
    (doubt,) = plan_of([*launch, "--gpu-memory", f"{between}"]).doubts
    assert doubt.startswith("--reset-attention-mask may take it from")


def test_fewer_gpus_than_a_layout_needs_have_a_head():
    launch = f"torchrun --nproc-per-node 8 pretrain_gpt.py {TINY} --bf16 --tp 4 --pp 4 --num-layers 4"
    found = plan_of(["--from-launch", launch])
    assert found.doubts == [
        "8 GPUs cannot be divided into groups of 16 (TP 4 x PP 4 x CP 1): give --gpus a multiple of 16"
    ]
    enough = plan_of(["--from-launch", launch, "--gpus", "16"])
    assert found.advice.baseline.head == enough.advice.baseline.head
    assert not {"vouch", "setting"} & dict(sentences(found)).keys()
    numbers = answer.as_dictionary(found)
    assert numbers["parameters"] is numbers["gpus"] is numbers["saved"] is None
    assert all(set(way) == {"flags", "plan", "head"} for way in numbers["ways"].values())
    # What can be mended comes first, whatever else is not counted.
    (doubt,) = plan_of(["--from-launch", f"{launch} --fp8-format hybrid --seq-lenght 4"]).doubts
    assert doubt.startswith("8 GPUs") and doubt.endswith(", and 2 more below")
    found = plan_of(["--from-launch", f"{TINY} --fp8-format hybrid --seq-lenght 4"])
    assert found.doubts[0].startswith("--seq-lenght is none of Megatron's")
    assert found.judged.uncounted["--bf16"].startswith("attention in fp32")
    with pytest.raises(ValueError, match="8 GPUs cannot be divided"):
        plan_of(["--from-launch", launch, "--gpus", "8"])


def test_no_verdict_is_status_3(capsys):
    for more in ([], ["--json"], ["--explain"]):
        assert command.main(["--from-launch", f"{TINY} --bf16", *more]) == 0
        assert command.main(["--from-launch", f"{TINY} --bf16 --fp8-format hybrid", *more]) == 3
        out = capsys.readouterr().out
        if more == ["--json"]:
            assert '"decision": "no verdict"' in out
    assert "3 (no verdict)" in command.HELP


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("pretrain_gpt.py {}", ""),
        ("torchrun --nproc-per-node 2 -m megatron_fused_ce.launch pretrain_mamba.py {}", ""),
        ("bash -c 'python pretrain_gpt.py {}'", ""),
        ("NVTE_FLASH_ATTN=1 NVTE_BWD_LAYERNORM_SM_MARGIN=16 NCCL_DEBUG=INFO pretrain_gpt.py {}", ""),
        ("NVTE_FLASH_ATTN=0 pretrain_gpt.py {}", "NVTE_FLASH_ATTN=0 in the environment is not counted"),
        ("env NVTE_FP8_DPA_BWD=1 pretrain_gpt.py {}", "NVTE_FP8_DPA_BWD=1 in the environment is not counted"),
        ("bash -c 'NVTE_FUSED_ATTN=0 python pretrain_gpt.py {} $@' x", "NVTE_FUSED_ATTN=0 in the env"),
        ("bash -c 'python pretrain_gpt.py {} $@' x --fp8-format hybrid", f"--fp8-format {PLAIN}"),
        ("xargs python pretrain_gpt.py {}", "what xargs adds is not known"),
        ("./fp8.sh torchrun --nproc-per-node 2 pretrain_gpt.py {}", "what fp8.sh trains is not known"),
        ("torchrun --nproc-per-node 2 -m my.wrapper pretrain_gpt.py {}", "what -m my.wrapper trains is not"),
        ("accelerate launch --use_deepspeed --num_processes 2 pretrain_gpt.py {}", "what --use_deepspeed"),
        ("train_rl.py {}", "what train_rl.py trains is not known"),
        ("torchrun --nproc-per-node 2 -m my.train {}", "what -m my.train trains is not known"),
        ("deepspeed --num_gpus 2 pretrain_t5.py {}", "what pretrain_t5.py trains is not known"),
        ("pretrain_gpt.py {} --hybrid-layer-pattern M*", "a hybrid by pretrain_gpt.py is not counted"),
    ],
)
def test_the_program_counts_too_and_what_is_around_it(launch, said):
    words = TINY.replace("--num-layers 2", "--encoder-num-layers 2") if "t5" in launch else TINY
    found = plan_of(["--from-launch", launch.format(f"{words} --bf16"), "--gpus", "2"])
    assert bool(found.doubts) == bool(said) and said in "; ".join(found.doubts)
    # The head's numbers come always.
    plain = plan_of(["--from-launch", f"{TINY} --bf16", "--gpus", "2"])
    peaks = [[way.head.peak for way in one.advice.ways[:3]] for one in (found, plain)]
    assert peaks[0] == peaks[1]


def test_a_model_that_cannot_be_planned_has_a_head():
    """Layers and heads that do not divide, letters that are not known: the head of a plain model."""
    launch = f"{TINY} --bf16 --fp8-format e4m3 --num-attention-heads 7 --kv-channels 8 --num-layers 7"
    found = plan_of(["--from-launch", f"{launch} --hybrid-layer-pattern XYZ --tp 2 --pp 2", "--gpus", "4"])
    plain = plan_of(["--from-launch", f"{TINY} --bf16 --tp 2 --pp 2", "--gpus", "4"])
    assert found.doubts and found.advice.baseline.head == plain.advice.baseline.head


def test_a_quick_geglu_is_a_gate_and_learned_positions_can_be_none():
    sizes = [peaks.parameters(tiny(gate)) for gate in ("--quick-geglu", "--swiglu")]
    assert sizes[0] - sizes[1] == 2 * 3 * 64 * (256 - 128) + 2 * 2 * (256 - 128)  # F of its own, biases
    words = ("--no-position-embedding",), ("--position-embedding-type", "rope")
    assert [tiny(*more).model.learned_positions for more in ((), *words)] == [128, 0, 0]


#: Of another kind in a later version, whose the file has.
LATER = ["rampup_batch_size", "rl_use_sequence_packing", "lazy_mpu_init"]
LATER += ["cuda_graph_scope", "export_kv_cache_quant"]


@on_checkouts
def test_the_file_has_every_argument_of_megatrons_parser(checkout):
    """With the default of that version and the kind of each option; and every class is one that is known."""
    place = closed_world.versions().index(megatron_records.version(Path(checkout)))
    found = closed_world.arguments()
    for name, options, action, nargs, default in megatron_arguments_script.parsers(Path(checkout)):
        kind = megatron_arguments_script.KINDS.get(action, "*" if nargs in ("+", "*") else "v")
        here = {option: found[name].options.get(option) for option in options}
        assert here == dict.fromkeys(options, kind) or (name in LATER and None not in here.values()), name
        assert default == found[name].defaults[place] or len(set(options)) != len(found[name].options), name


def test_every_class_is_known_and_says_why():
    for argument in closed_world.arguments().values():
        which, _, rest = argument.which.partition(" ")
        assert which in ("counted", "none", "where", "as", "bounded", "derived", "log", "-"), argument
        assert argument.why or which in ("counted", "-"), argument
        assert which != "where" or set(rest.split(" or ")) <= set(closed_world.CONDITIONS), argument


# --- what it prints --------------------------------------------------------------------------


def test_the_page_names_every_model_and_option():
    page = check_plan.PAGE.read_text()
    assert "Use it: " in page  # of the example
    assert all(f"`{name}`" in page for name in MODELS)
    for action in command._parser(own=True)._action_groups[1]._group_actions:
        assert action.option_strings[-1] in page or "--help" in action.option_strings


def test_json_has_the_sums(capsys):
    words = ["--model", "llama-3.2-1b", "--seq-length", "8192", "--gpus", "2", "--json"]
    assert command.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 1_235_814_400
    assert set(found["ways"]) == {"unfused", "native", "te", "auto", "store", "grad_in_forward", "recompute"}
    for way in found["ways"].values():
        moments = way["moments"]
        for moment in moments.values():
            parts = [size for name, size in moment.items() if name not in ("stage", "total")]
            assert sum(parts) == moment["total"]
        assert way["peak"] == max(moment["total"] for moment in moments.values())
        assert moments[way["bound"]]["total"] == way["peak"]
    assert found["saved"] == found["ways"]["unfused"]["peak"] - found["recommended"]["peak"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_recommendation_can_be_planned(name):
    """The flags that a plan prints, added to its own command line, give the promised peak."""
    for gpus, tensor, tokens in ((1, 1, 131072), (8, 4, 4096), (8, 1, 32768)):
        words = ["--model", name, "--gpus", str(gpus), "--tp", str(tensor)]
        words += ["--sequence-parallel", "--seq-length", str(tokens)]
        way = plan_of(words).advice.recommended
        again = plan_of([*words, *way.head.flags.split()]).advice
        assert again.way("auto").peak == way.peak, (words, way.head.flags)


def test_a_strategy_beyond_the_budget_says_so(capsys):
    words = ["--model", "llama-3-8b", "--gpus", "8", "--tp", "4", "--sequence-parallel"]
    words += ["--seq-length", "32768", "--fused-chunked-ce", "--fused-ce-memory-mb", "416"]
    assert command.main([*words, "--explain"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith(" --fused-chunked-ce, ")}
    assert "refused" in rows["store"] and "yes" in rows["auto"] and "yes" in rows["recompute"]
    # What "auto" takes is within the budget: where nothing is, the plan says so and does not say "yes".
    assert "No plan takes" not in out
    # The launch itself would stop.
    with pytest.raises(ValueError, match=r"needs 2138 MiB .* the budget is 416 MiB"):
        plan_of([*words, "--fused-ce-strategy", "store"])


def test_names_in_any_case_and_gpus_by_their_first():
    found = plan_of(["--seq-length", "4096", "--model", "LLAMA-3-8b", "--gpu", "H100"])
    assert (found.name, found.advice.gpu.name) == ("llama-3-8b", "h100-80gb")


# --- bad input -------------------------------------------------------------------------------

MODEL = "--model llama-3-8b --seq-length 8192"
NO_VOCABULARY = TINY.replace("--vocab-size 256 ", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt-5 --seq-length 64", "no model 'gpt-5'; there are llama-3-8b"),
        ("--model llama3-8b --seq-length 64", "did you mean llama-3-8b?"),
        ("--model llama-3-8b", "--seq-length is missing"),
        (f"--from-launch '{NO_VOCABULARY}'", "--vocab-size is missing: give it beside the launch"),
        (f"--from-launch '{NO_VOCABULARY} --tokenizer-model x/qwen3-99b'", "is missing: give it beside"),
        (
            f"--from-launch '{NO_VOCABULARY} --tokenizer-model Qwen/Qwen3-30B-A3B'",
            "--vocab-size is missing: give --vocab-size 151936 beside the launch, as Qwen/Qwen3-30B-A3B has",
        ),
        ("", "--hidden-size is missing: give it, or --model NAME, --from-log FILE or --from-launch FILE"),
        ("--from-launch nowhere.sh", "nowhere.sh: No such file"),
        (f"{MODEL} --from-launch '{TINY}'", "not allowed with argument"),
        (f"{MODEL} --hiden-size 3", "--hiden-size is no argument of plan, nor one that it counts"),
        (f"--from-launch '{TINY}' --fp8-format hybrid", "--fp8-format is no argument of plan, nor one that"),
        (f"--from-launch '{TINY} --bf16 --hidden-size 66'", "66 cannot be divided by --num"),
        (f"{MODEL} --tp 3 --gpus 3", "32 attention heads cannot be divided over 3 ranks"),
        (f"{MODEL} --tp 4 --gpus 6", "6 GPUs cannot be divided into groups of 4"),
        (f"{MODEL} --pp 5 --gpus 5", "32 layers cannot be divided into 5 pipeline stages"),
        (f"{MODEL} --gpus 8 --global-batch-size 12", "give a multiple of 8"),
        (f"{MODEL} --num-query-groups 5", "32 attention heads cannot be divided into 5 query groups"),
        (f"{MODEL} --gpu tpu", "invalid choice: 'tpu' (choose from"),
        (f"--from-launch '{TINY} --ffn-hidden-size <SIZE>'", "--ffn-hidden-size is <SIZE>, a place"),
        (f"{MODEL} --overhead 90", "leaves nothing of 79.14 GiB"),
        (f"--from-launch '{TINY} --bf16 --num-experts 6 --ep 4'", "6 experts cannot be divided over 4"),
        (f"--from-launch '{TINY}' --set X", "--set takes NAME=VALUE"),
        (f"--from-launch '{TINY}' --set X=1", "arguments in quotes have none"),
        (f"{MODEL} --pp 2 --pipeline-model-parallel-layout 'Et|tL'", "2 layers in 2 parts; there"),
        (f"{MODEL} --pipeline-model-parallel-layout Et*9x", "'Et*9x' is no layout such as Et*3"),
        (f"--from-launch 'torchrun --nproc-per-node gpu x.py {TINY}'", "no number of ranks: give --gpus")
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = command.main(shlex.split(words))
    out, error = capsys.readouterr()
    assert status == 2
    assert error.startswith("plan: ") and error.count("\n") == 1 and said in error
    assert not out and not list(tmp_path.iterdir())


def test_what_a_script_lacks_is_asked_for_and_what_it_has_not_is_an_error(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.sh"
    script.write_bytes(b"\xff\xfe\x00")
    plan = ["--from-launch", str(script), "--json"]
    assert command.main(plan) == 2
    assert "is no text file" in capsys.readouterr().err
    script.write_text(
        f"SIZE=8b\nS=$(cat seq)\npython pretrain_gpt.py {TINY} --seq-length $S --lr $(cat lr)\n"
    )
    assert command.main([*plan, "--set", "NOPE=2"]) == 2
    assert "--set NOPE: the script has no such variable; there are S, SIZE" in capsys.readouterr().err
    assert command.main(plan) == 2
    assert f"{script}: no value is known for S: give --set S=VALUE" in capsys.readouterr().err
    for given in (["--set", "S=64"], ["--seq-length", "64"]):
        assert setting_of([*plan, *given]).training.sequence == 64
    # Two that are given otherwise, at the end.
    last = tmp_path / "last.sh"
    last.write_text(f"python pretrain_gpt.py {TINY} --micro-batch-size=$(cat b) --seq-length $(cat seq)\n")
    words = ["--from-launch", str(last), "--seq-length", "64", "--micro-batch-size", "2"]
    assert setting_of(words).training.micro_batch == 2
    notes = plan_of([*plan, "--seq-length", "64", "--tp", "2"]).notes
    assert notes[0].startswith("The number of GPUs is not known, since no launcher is named: planned for the")
    assert "the parallel sizes take, 2; or give --gpus" in notes[0]
    assert plan_of([*plan, "--seq-length", "64", "--gpus", "2"]).notes == []
    # Without the parser of bash.
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    monkeypatch.delitem(sys.modules, "megatron_fused_ce.plan.shell_script", raising=False)
    assert package_command.main(["plan", *plan]) == 2
    assert capsys.readouterr().err.endswith("needs tree_sitter_bash: pip install tree_sitter_bash\n")
    assert setting_of(["--from-launch", TINY]).model.num_layers == 2


def test_a_scripts_defaults_are_told_and_its_own_words_taken(tmp_path, monkeypatch):
    """Of the defaults those that decide; an environment is not read."""
    script = tmp_path / "train.sh"
    script.write_text(
        'PRECISION=${PRECISION:-bf16}\nPORT=${PORT:-6000}\n: "${OUT:=/out}"\n'
        'if [ "${BIG:-no}" = yes ]; then L=8; else L=2; fi\n'
        f"torchrun --master-port $PORT pretrain_gpt.py {TINY} --num-layers $L --$PRECISION --save $OUT"
        " --micro-batch-size ${1:-1}\n"
    )
    monkeypatch.setenv("PRECISION", "fp16")
    plan = ["--from-launch", str(script)]
    found = plan_of(plan)
    assert found.setting.training.dtype == "bfloat16"
    assert found.notes == [
        "Defaults taken from the script: PRECISION=bf16, BIG=no, 1=1; --set NAME=VALUE gives another."
    ]
    found = plan_of([*plan, "--set", "PRECISION=fp16", "--set", "BIG=yes", "--micro-batch-size", "2"])
    assert (found.setting.training.dtype, found.setting.model.num_layers) == ("float16", 8)
    assert found.notes == []
    for launch in (f"{script} 4 x", f"bash {script} 4", f"sh  {script} '4'"):
        found = plan_of(["--from-launch", launch, "--set", "PRECISION=fp16"])
        assert found.setting.training.micro_batch == 4 and found.name == "train.sh"
        assert found.notes == ["Defaults taken from the script: BIG=no; --set NAME=VALUE gives another."]
    with pytest.raises(ValueError, match=r"nowhere\.sh: No such file"):
        plan_of(["--from-launch", "nowhere.sh 4"])


# --- the front door --------------------------------------------------------------------------


def run(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before or 'pass'}; import runpy, sys; sys.argv = ['x', *{list(words)!r}]; "
    code += "runpy.run_module('megatron_fused_ce', run_name='__main__', alter_sys=False)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_it_needs_neither_torch_nor_rich_for_json():
    blocked = "import sys; sys.modules.update(torch=None, rich=None, matplotlib=None, megatron=None)"
    plan = ["plan", "--model", "llama-3.2-1b", "--seq-length", "8192"]
    done = run(*plan, "--json", before=blocked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 1_235_814_400
    tables = run(*plan, before=blocked)
    assert tables.returncode == 2 and tables.stderr.count("\n") == 1
    assert "pip install" in tables.stderr


def test_the_commands_of_the_package():
    """tests/project/test_packaging.py runs each."""
    assert run("--version").stdout == f"megatron_fused_ce {megatron_fused_ce.__version__}\n"
    done = run()  # help
    assert done.returncode == 0 and not done.stderr
    for name, (_, what) in package_command.COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(what)}$", done.stdout, re.MULTILINE)


def test_the_scripts_know_the_same_models():
    from megatron_fused_ce.scripts.bench import cases
    from megatron_fused_ce.scripts.runs import pretrain

    assert set(MODELS) < set(cases.SHAPES)
    assert cases.SHAPES["llama-3-8b"] == (4096, 128256)
    assert cases.shape_name("Qwen3-8B") == "qwen3-8b"
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean gemma-2-2b"):
        cases.shape_name("gemma2-2b")
    words = f"{pretrain.model_args('llama-3-8b:2')} {pretrain.COMMON_ARGS} --seq-length 128"
    model = setting_of(["--model", "llama-3-8b", "--seq-length", "128"]).model
    # The tokenizer adds its end of document.
    assert setting_of(["--from-launch", words]).model == replace(model, num_layers=2, vocab_size=128255)
