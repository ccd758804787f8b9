"""``python -m megatron_fused_ce plan``: launches that it reads, what it prints, and what it refuses."""

from __future__ import annotations

import argparse
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
from megatron_fused_ce.plan import closed_world, command, static
from megatron_fused_ce.plan.command import plan_of, setting_of
from megatron_fused_ce.plan.named_models import MODELS
from megatron_fused_ce.plan.setting import Recompute
from megatron_fused_ce.scripts.dev import figures_plan as check_plan
from megatron_fused_ce.scripts.dev import megatron_arguments as megatron_arguments_script
from megatron_fused_ce.scripts.dev import megatron_records
from tests.support.checkouts import on_checkouts

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128"


# --- launch scripts: tests/plan/launch_scripts.txt has what is read of them -------------------------


@pytest.mark.parametrize(
    "launcher", ["--nproc-per-node gpu", "--nproc-per-node 8 --nnodes 1:4", "--nproc-per-node $GPUS"]
)
def test_a_number_of_ranks_that_only_the_machine_knows_is_asked_for(launcher, tmp_path):
    text = f"torchrun {launcher} pretrain_gpt.py {TINY}"
    script = tmp_path / "train.sh"
    script.write_text(text)
    for launch in (text, str(script)):
        with pytest.raises(ValueError, match=r"(is no number of ranks: give|for GPUS: give .* or) --gpus"):
            setting_of(["--from-launch", launch])
        assert setting_of(["--from-launch", launch, "--gpus", "4"]).parallel.gpus == 4


EXAMPLES = sorted(path for path in (ROOT / "scripts" / "examples").glob("*.sh") if path.stem != "launch")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_planned_and_have_the_models_size(example):
    """GPUs and parameters are those that tests/tools/test_examples.py finds through Megatron's own parser."""
    from megatron_fused_ce.plan.static import parameters
    from tests.support.launches import LAUNCHES

    found = plan_of(["--from-launch", str(example)])
    known = LAUNCHES[example.stem]
    assert found.setting.parallel.gpus == known["gpus"]
    assert found.setting.parallel.data == known["data_parallel"]
    if known["billions"]:
        alone = replace(found.setting, vocab_divisor=1)
        assert parameters(alone) / 1e9 == pytest.approx(known["billions"], rel=1e-3)
    assert found.advice.recommended.verdict == "fits"


def test_nothing_of_a_script_is_run(tmp_path):
    trap = tmp_path / "trap"
    script = tmp_path / "train.sh"
    script.write_text(
        f"touch {trap}\nA=$(touch {trap})\nB=`touch {trap}`\nC=$((1+1))\n"
        f'if touch {trap}; then D=1; fi\neval "touch {trap}"\n'
        f"python pretrain_gpt.py {TINY} --save $A\n"
    )
    assert setting_of(["--from-launch", str(script)]).model.num_layers == 2
    assert not trap.exists()


def test_a_launch_as_a_string():
    text = f"torchrun --nproc-per-node=4 pretrain_gpt.py {TINY} --tensor-model-parallel-size 2 --bf16"
    one = setting_of(["--from-launch", text])
    assert (one.parallel.gpus, one.parallel.tensor, one.parallel.data) == (4, 2, 2)
    assert one.training.dtype == "bfloat16"
    # Megatron's defaults, not the usual settings: a mask, dropout, nothing sharded.
    assert one.training.attention_mask and one.training.hidden_dropout
    assert one.training.optimizer.sharding == "none"


def test_the_command_line_comes_last():
    one = setting_of(["--from-launch", f"{TINY} --bf16", "--seq-length", "256", "--gpus", "2"])
    assert (one.training.sequence, one.parallel.gpus) == (256, 2)
    assert (
        setting_of(["--model", "llama-3-8b", "--seq-length", "64", "--num-layers", "2"]).model.num_layers == 2
    )


# --- Megatron's arguments --------------------------------------------------------------------


def tiny(*words: str):
    return setting_of([*shlex.split(TINY), *words])


def test_arguments_become_sizes():
    one = tiny(
        "--swiglu", "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "32",
        "--untie-embeddings-and-output-weights", "--normalization", "RMSNorm", "--disable-bias-linear",
        "--position-embedding-type", "rope", "--mtp-num-layers", "1", "--micro-batch-size", "2",
        "--gpus", "8", "--tp", "2", "--cp", "2", "--sequence-parallel", "--global-batch-size", "16",
        "--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1",
    )  # fmt: skip
    model, parallel, training = one.model, one.parallel, one.training
    assert (model.num_query_groups, model.head_dim, model.ffn_hidden_size) == (2, 32, 128)
    assert (model.gated, model.tied, model.rms_norm, model.linear_bias, model.rotary) == (
        True, False, True, False, True
    )  # fmt: skip
    assert (model.learned_positions, model.mtp_num_layers) == (0, 1)
    assert (parallel.data, parallel.context, parallel.sequence_parts) == (2, 2, 2)
    assert training.num_micro_batches == 16 // 2 // 2
    assert training.recompute == Recompute(full=True, num_layers=1, block=True)
    assert one.num_tokens == 2 * 128 // 2


def test_defaults_are_megatrons():
    """A GPT of two layers: as many groups as heads, four times the hidden size, learned positions."""
    model = tiny().model
    assert (model.num_query_groups, model.ffn_hidden_size, model.learned_positions) == (4, 256, 128)
    assert tiny("--num-query-groups", "2").model.num_query_groups == 4


def test_experts_and_their_layers():
    words = ["--num-experts", "8", "--moe-ffn-hidden-size", "32", "--ep", "4", "--gpus", "4"]
    assert tiny(*words).model.mixture.layers == (True, True)
    assert tiny(*words, "--moe-layer-freq", "2").model.mixture.layers == (True, False)
    assert tiny(*words, "--moe-layer-freq", "[0]+[1]*1").model.mixture.layers == (False, True)


@pytest.mark.parametrize(
    ("layout", "stages", "layers"),
    [
        ("Et*3|(tt|)*29,m|L", 16, [[3, 2]] + [[2, 2]] * 13 + [[2, 0], [2, 0]]),
        ("Et*2|(tt|)*5t|tmL", 4, [[2, 2], [2, 2], [2, 1], [2, 1]]),
        ("Etttt|(t|)*2L", 4, [[4], [1], [1], [0]]),
        ("Et*3tL", 1, [[4]]),
    ],
)
def test_a_layout_of_the_stages(layout, stages, layers):
    words = ["--num-layers", str(sum(map(sum, layers))), "--pp", str(stages), "--mtp-num-layers", "1"]
    found = static.stages(tiny(*words, "--pipeline-model-parallel-layout", layout))
    assert [[len(chunk) for chunk in stage.chunks] for stage in found] == layers
    # A stage without layers, or without its last ones, can be planned.
    plan_of([*shlex.split(TINY), *words, "--pipeline-model-parallel-layout", layout])


def test_a_hybrid_pattern_with_stages_and_predictions():
    one = setting_of(shlex.split(
        "--hybrid-layer-pattern M*|-M/*-/*- --hidden-size 64 --num-attention-heads 4 --vocab-size 256"
        " --seq-length 128 --pp 2 --mamba-head-dim 16"
    ))  # fmt: skip
    assert (one.model.num_layers, one.model.pattern, one.model.mtp_num_layers) == (4, "M*-M", 2)
    assert one.model.prediction_pattern == "*-"
    assert one.model.state_space.num_heads == 8


@pytest.mark.parametrize(
    ("words", "gradient", "state", "step"),
    [
        ("--bf16", 4, 12, 0),
        ("", 4, 8, 0),
        ("--fp16", 2, 12, 4),
        ("--bf16 --grad-reduce-in-bf16", 2, 12, 4),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 4, 7, 0),
        ("--bf16 --bytes-per-parameter 20 --adam foreach", 4, 14, 4),
    ],
)
def test_bytes_of_a_parameter(words, gradient, state, step):
    options = [option for option in shlex.split(words) if option in ("--adam", "foreach")]
    own = ["--bytes-per-parameter", "20"] if "--bytes" in words else []
    launch = words.partition(" --bytes")[0]
    one = setting_of(["--from-launch", f"{TINY} {launch}", *own, *options])
    found = one.training.optimizer
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
        ("--zero-stage 2 --deepspeed", "--zero-stage is none of Megatron's arguments, and 1 more"),
        ("--use-megatron-fsdp", f"--use-megatron-fsdp {PLAIN}"),
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
        ("--use-checkpoint-args", f"--use-checkpoint-args {PLAIN}"),
        ("--cuda-graph-impl local", f"--cuda-graph-impl {PLAIN}"),
        ("--kv-channels 512", "heads of 512"),
        ("--transformer-impl inference_optimized", "--transformer-impl inference_optimized is not counted"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex is not counted"),
    ],
)  # fmt: skip
def test_what_is_not_counted_takes_the_verdict(words, said):
    found = plan_of(["--from-launch", f"{TINY} --bf16 {words}", "--gpus", "2"])
    assert said in "; ".join(found.doubts) and bool(found.doubts) == bool(said)
    if "layers of kind" in said:
        return
    vouched = [f"--ignore={name.strip('-')}" for name in found.judged.uncounted]
    assert not plan_of(["--from-launch", f"{TINY} --bf16 {words}", "--gpus", "2", *vouched]).doubts
    with pytest.raises(ValueError, match="--ignore nonsense vouches for nothing here"):
        plan_of(["--from-launch", f"{TINY} --bf16 {words}", "--gpus", "2", "--ignore", "nonsense"])


@pytest.mark.parametrize(
    ("program", "unknown"),
    [
        ("pretrain_gpt.py", ""),
        ("/opt/megatron/pretrain_hybrid.py", ""),
        ("torchrun --nproc-per-node 2 -m megatron_fused_ce.launch pretrain_mamba.py", ""),
        ("python -m cProfile -o out.prof pretrain_gpt.py", ""),
        ("./fp8.sh torchrun --nproc-per-node 2 pretrain_gpt.py", "fp8.sh"),
        ("torchrun --nproc-per-node 2 -m my.wrapper pretrain_gpt.py", "-m my.wrapper"),
        ("accelerate launch --use_deepspeed --num_processes 2 pretrain_gpt.py", "--use_deepspeed"),
        ("train_rl.py", "train_rl.py"),
        ("pretrain_bert.py", "pretrain_bert.py"),
        ("torchrun --nproc-per-node 2 -m my.train", "-m my.train"),
        ("deepspeed --num_gpus 2 pretrain_t5.py", "pretrain_t5.py"),
    ],
)
def test_the_program_counts_too(program, unknown):
    words = TINY.replace("--num-layers 2", "--encoder-num-layers 2") if "t5" in program else TINY
    found = plan_of(["--from-launch", f"{program} {words} --bf16", "--gpus", "2"])
    said = [doubt for doubt in found.doubts if "trains is not known" in doubt]
    assert said == ([f"what {unknown} trains is not known"] if unknown else [])
    # The head's numbers come always.
    assert [way.head.peak for way in found.advice.ways][:3] == [
        way.head.peak for way in plan_of(["--from-launch", f"{TINY} --bf16", "--gpus", "2"]).advice.ways
    ][:3]


def test_a_model_that_cannot_be_planned_has_a_head():
    """Layers and heads that do not divide, letters that are not known: the head of a plain model."""
    launch = f"{TINY} --bf16 --fp8-format e4m3 --num-attention-heads 7 --kv-channels 8 --num-layers 7"
    found = plan_of(["--from-launch", f"{launch} --hybrid-layer-pattern XYZ --tp 2 --pp 2", "--gpus", "4"])
    plain = plan_of(["--from-launch", f"{TINY} --bf16 --tp 2 --pp 2", "--gpus", "4"])
    assert found.doubts and found.advice.baseline.head == plain.advice.baseline.head


def test_ratios_of_015_and_016_are_a_pattern():
    """examples/mamba/train.sh, 8B: 4 attention layers and 28 MLPs of 56."""
    words = (
        "--num-layers 56 --hidden-size 4096 --num-attention-heads 32 --group-query-attention"
        " --num-query-groups 8 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --seq-length 4096"
        " --untie-embeddings-and-output-weights --normalization RMSNorm --disable-bias-linear --bf16"
        " --position-embedding-type none --tensor-model-parallel-size 4 --sequence-parallel"
        " --vocab-size 256000"
    )
    one = setting_of(["--from-launch", f"torchrun --nproc-per-node 8 pretrain_mamba.py {words}"])
    assert one.model.pattern == "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert round(static.parameters(one) / 1e9, 2) == 8.65
    alone = setting_of(["--from-launch", f"pretrain_mamba.py {TINY}"])
    assert alone.model.pattern == "MM"


def test_attention_in_fp32_and_a_hybrid_by_pretrain_gpt_get_none():
    words = f"pretrain_gpt.py {TINY}"
    for more, said in (
        ("", "attention in fp32"),
        ("--bf16 --hybrid-layer-pattern M*", "a hybrid by pretrain"),
    ):
        assert said in plan_of(["--from-launch", f"{words} {more}", "--gpus", "2"]).doubts[0]


def test_a_quick_geglu_is_a_gate_and_learned_positions_can_be_none():
    """The gate's rows are counted; a launch with it still gets no verdict, since what it keeps is not."""
    gate = plan_of(["--from-launch", f"{TINY} --bf16 --quick-geglu"])
    sizes = static.parameters(gate.setting), static.parameters(tiny("--swiglu"))
    assert gate.setting.model.gated and sizes[0] > sizes[1]  # 4H rows, where SwiGLU takes 8/3 H
    assert gate.doubts == ["--quick-geglu may change memory and is not counted"]
    assert tiny().model.learned_positions == 128
    assert tiny("--no-position-embedding").model.learned_positions == 0
    assert tiny("--padded-vocab-size", "384").padded_vocab_size == 384


#: Of another kind in a later version, whose the file has.
LATER = (
    *("rampup_batch_size", "rl_use_sequence_packing", "lazy_mpu_init"),
    *("cuda_graph_scope", "export_kv_cache_quant"),
)


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
    counted = {name for name, one in closed_world.arguments().items() if one.which.startswith("counted")}
    parsed = {action.dest for action in command._parser(own=False)._actions}
    assert counted - parsed == {"hybrid_override_pattern", "optimizer"}


@on_checkouts
def test_names_and_defaults_are_those_of_megatrons_parser(checkout):
    theirs = {name: row for row in megatron_arguments_script.parsers(Path(checkout)) for name in row[1]}
    own = {"--post-norms", "--tp", "--pp", "--cp", "--ep"}
    for action in command._parser(own=False)._actions:
        names = {name for name in action.option_strings if not name.startswith("--fused-")} - own
        assert not names or all(name in closed_world._by_option() for name in names), (
            f"Megatron has not {names}"
        )
        for name in names & set(theirs):  # a pattern of layers has another name since 0.17
            *_, nargs, default = theirs[name]
            assert nargs == action.nargs or {nargs, action.nargs} == {"*", "+"}, name
            usual = name in ("--micro-batch-size", "--attention-backend", "--data-parallel-sharding-strategy")
            if action.nargs != 0 and not usual:
                assert str(default) == str(action.default), name


# --- what it prints --------------------------------------------------------------------------


def test_the_page_names_every_model_and_option():
    page = check_plan.PAGE.read_text()
    assert "Use it: " in page  # of the example
    assert all(f"`{name}`" in page for name in MODELS)
    own = command._parser(own=True)._action_groups[1]._group_actions
    for action in own:
        if action.option_strings[0] not in ("-h", "--adam"):
            assert action.option_strings[-1] in page


@pytest.mark.parametrize(
    ("model", "kinds"), [("llama-3-8b", []), ("deepseek-v3", ["experts", "latent attention"])]
)
def test_a_plan_says_what_was_never_measured(model, kinds, capsys):
    words = ["--model", model, "--seq-length", "4096"]
    command.main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["not_measured"] == kinds
    command.main([*words, "--explain"])
    said = f"Measured in no run or in one, derived from Megatron's code: {', '.join(kinds)}."
    assert (said in capsys.readouterr().out) == bool(kinds)


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
    saved = found["ways"]["unfused"]["peak"] - found["recommended"]["peak"]
    assert found["saved"] == saved > 0


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
    with pytest.raises(ValueError, match=r"needs 2139 MiB .* the budget is 416 MiB"):
        plan_of([*words, "--fused-ce-strategy", "store"])


@pytest.mark.parametrize(
    ("versions", "row"),
    [(("0.16",), "Transformer Engine "), (("0.19",), "refused"), (("0.15", "0.17", "0.18"), "(to 0.17)")],
)
def test_transformer_engines_loss_is_refused_from_018_on(versions, row, tmp_path, capsys, monkeypatch):
    """As a log's arguments say, or the checkout that a script lies in; where neither says, both are."""
    script = tmp_path / "examples" / "train.sh"
    script.parent.mkdir()
    script.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {TINY} --bf16\n")
    if len(versions) == 1:
        info = tmp_path / "megatron" / "core" / "package_info.py"
        info.parent.mkdir(parents=True)
        info.write_text(f"MAJOR = 0\nMINOR = {versions[0][2:]}\n")
    assert command.main(["--from-launch", str(script)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Transformer Engine" in line)
    assert row in line and ("refused" in line) == (versions == ("0.19",))


@pytest.mark.parametrize(
    ("gpu", "name"), [("h100", "h100-80gb"), ("B200", "b200-180gb"), ("a100-80gb", "a100-80gb")]
)
def test_a_gpu_by_its_first_name(gpu, name):
    assert plan_of(["--model", "llama-3.2-1b", "--seq-length", "4096", "--gpu", gpu]).advice.gpu.name == name


def test_another_programs_loss_is_the_baseline():
    found = plan_of(["--model", "qwen2.5-7b", "--gpus", "8", "--seq-length", "4096",
                     "--logit-bytes", "12"]).advice  # fmt: skip
    assert found.baseline.head.name == "12 bytes a logit"
    assert found.baseline.head.peak == 12 * 4096 * 152064 + 64 * 2**20


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(tmp_path, ending):
    target = tmp_path / f"plan.{ending}"
    words = ["--model", "llama-3.2-1b", "--seq-length", "8192", "--plot", str(target), "--json"]
    assert command.main(words) == 0
    begin = target.read_bytes()[:100]
    assert begin.startswith(b"\x89PNG") or b"<?xml" in begin
    assert list(tmp_path.iterdir()) == [target], "a partial file is left"


@pytest.mark.parametrize("memory", ["79.14", "40", "400"])
def test_the_pictures_line_is_the_limit_and_nothing_lies_on_it(memory, tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    script = ROOT / "scripts" / "examples" / "llama3_8b.sh"
    words = ["--from-launch", str(script), "--gpu-memory", memory, "--json"]
    assert command.main([*words, "--plot", str(tmp_path / "plan.svg")]) == 0
    advice = plan_of(words).advice
    (figure,) = figures
    (axes,) = figure.axes
    assert figure.get_suptitle().startswith("llama3_8b.sh, 8192 tokens x 1, 8 GPUs, TP 2 + SP")
    (line,) = axes.lines
    usable = advice.gpu.usable / 2**30
    assert set(line.get_xdata()) == {usable}
    for way in advice.ways:
        assert (way.verdict == "does not fit") == (way.peak / 2**30 > usable)
    of_bars = [
        text for text in axes.texts if "GiB" not in text.get_text() and "usable" not in text.get_text()
    ]
    assert len(of_bars) == len(advice.ways)
    longest = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert all(text.get_position()[0] > max(longest, usable) for text in of_bars)
    (of_line,) = (text for text in axes.texts if "usable" in text.get_text())
    assert of_line.get_ha() == "right" and of_line.xy[1] == 1, "above the axes, left of the line"


# --- bad input -------------------------------------------------------------------------------

MODEL = ["--model", "llama-3-8b", "--seq-length", "8192"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt-5", "--seq-length", "64"], "no model 'gpt-5'; there are llama-3-8b"),
        (["--model", "llama-3-8b"], "--seq-length is missing"),
        ([], "--hidden-size is missing: give it, or --model NAME, --from-log FILE or --from-launch FILE"),
        (["--from-launch", "nowhere.sh"], "nowhere.sh: No such file"),
        (["--from-launch", "--num-layers 2 'open"], "No closing quotation"),
        ([*MODEL, "--from-launch", TINY], "not allowed with argument"),
        ([*MODEL, "--hiden-size", "3"], "unrecognized arguments: --hiden-size"),
        (["--from-launch", f"{TINY} --bf16 --hidden-size 66"], "66 cannot be divided by --num"),
        ([*MODEL, "--tp", "3", "--gpus", "3"], "32 attention heads cannot be divided over 3 ranks"),
        ([*MODEL, "--tp", "4", "--gpus", "6"], "6 GPUs cannot be divided into groups of 4"),
        ([*MODEL, "--tp", "4", "--gpus", "1"], "give --gpus a multiple of 4"),
        ([*MODEL, "--pp", "5", "--gpus", "5"], "32 layers cannot be divided into 5 pipeline stages"),
        ([*MODEL, "--tp", "0"], "expected a whole number from 1 to 100000, got '0'"),
        ([*MODEL, "--seq-length", "0"], "expected a whole number from 1 to 1000000000"),
        ([*MODEL, "--gpus", "8", "--global-batch-size", "12"], "give a multiple of 8"),
        ([*MODEL, "--num-query-groups", "5"], "32 attention heads cannot be divided into 5 query groups"),
        ([*MODEL, "--fused-ce-num-chunks", "2", "--fused-ce-chunk-tokens", "2"], "not allowed with argument"),
        ([*MODEL, "--bytes-per-parameter", "3"], "less than weight and gradient"),
        ([*MODEL, "--gpu", "tpu"], "no GPU 'tpu'; there are h100-80gb, h200-141gb"),
        (["--from-launch", f"{TINY} --ffn-hidden-size <SIZE>"], "--ffn-hidden-size is <SIZE>, a place"),
        ([*MODEL, "--moe-layer-freq", "__import__('os')"], "no list of 0 and 1"),
        ([*MODEL, "--overhead", "90"], "leaves nothing of 79.14 GiB"),
        ([*MODEL, "--gpu-memory", "0"], "expected a number above 0"),
        ([*MODEL, "--tp", "8", "--logit-bytes", "0"], "expected a number above 0"),
        ([*MODEL, "--plot", "/dev/null/where.png"], "cannot write to"),
        (["--model", "llama-3.2-1b", "--seq-length", "64", "--plot", "plan.nothing"], "nothing"),
        (["--from-launch", f"{TINY} --bf16 --num-experts 6 --ep 4"], "6 experts cannot be divided over 4"),
        (["--from-launch", TINY, "--set", "X"], "--set takes NAME=VALUE"),
        (["--from-launch", TINY, "--set", "X=1"], "arguments in quotes have none"),
        ([*MODEL, "--pp", "2", "--pipeline-model-parallel-layout", "Et|tL"], "2 layers in 2 parts; there"),
        ([*MODEL, "--pipeline-model-parallel-layout", "Et*9x"], "'Et*9x' is no layout such as Et*3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = command.main(words)
    out, error = capsys.readouterr()
    assert status == 2
    assert error.startswith("plan: ") and error.count("\n") == 1 and said in error
    assert not out and not list(tmp_path.iterdir())


def test_a_script_that_is_none(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_bytes(b"\xff\xfe\x00")
    assert command.main(["--from-launch", str(script)]) == 2
    assert "is no text file" in capsys.readouterr().err
    script.write_text("python pretrain_gpt.py --num-layers $L")
    assert command.main(["--from-launch", str(script)]) == 2
    assert f"{script}: no value is known for L: give --set L=VALUE" in capsys.readouterr().err


def test_what_a_script_lacks_is_asked_for_and_what_it_has_not_is_an_error(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text(
        f"SIZE=8b\nS=$(cat seq)\npython pretrain_gpt.py {TINY} --seq-length $S --lr $(cat lr)\n"
    )
    plan = ["--from-launch", str(script), "--json"]
    assert command.main([*plan, "--set", "NOPE=2"]) == 2
    assert "--set NOPE: the script has no such variable; there are S, SIZE" in capsys.readouterr().err
    assert command.main(plan) == 2
    assert "no value is known for S: give --set S=VALUE" in capsys.readouterr().err
    for answer in (["--set", "S=64"], ["--seq-length", "64"]):
        assert setting_of([*plan, *answer]).training.sequence == 64
    notes = plan_of([*plan, "--seq-length", "64", "--tp", "2"]).notes
    assert notes[0].startswith("The number of GPUs is not known, since no launcher is named: planned for the")
    assert "the parallel sizes take, 2; or give --gpus" in notes[0]
    assert plan_of([*plan, "--seq-length", "64", "--gpus", "2"]).notes == []


def test_without_the_parser_of_bash(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    monkeypatch.delitem(sys.modules, "megatron_fused_ce.plan.shell_words", raising=False)
    script = tmp_path / "train.sh"
    script.write_text(f"python pretrain_gpt.py {TINY}\n")
    assert command.main(["--from-launch", str(script)]) == 2
    assert "pip install tree-sitter tree-sitter-bash" in capsys.readouterr().err
    assert setting_of(["--from-launch", TINY]).model.num_layers == 2


# --- the front door --------------------------------------------------------------------------


def run(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before or 'pass'}; import runpy, sys; sys.argv = ['x', *{list(words)!r}]; "
    code += "runpy.run_module('megatron_fused_ce', run_name='__main__', alter_sys=False)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_it_needs_neither_torch_nor_rich_for_json():
    blocked = "import sys; sys.modules.update(torch=None, rich=None, matplotlib=None, megatron=None)"
    done = run("plan", "--model", "llama-3.2-1b", "--seq-length", "8192", "--json", before=blocked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 1_235_814_400
    tables = run("plan", "--model", "llama-3.2-1b", "--seq-length", "8192", before=blocked)
    assert tables.returncode == 2 and tables.stderr.count("\n") == 1
    assert "pip install" in tables.stderr


def test_the_commands_of_the_package():
    words = ["--tokens", "1024", "--hidden", "64", "--vocab", "512"]
    planned = run("plan-head", *words)
    assert planned.returncode == 0 and planned.stdout.startswith("store, 1 chunk")
    assert run("autoload", "status").returncode == 0
    done = run("plans")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in package_command.COMMANDS)


def test_without_a_command_help_is_printed():
    done = run()
    assert done.returncode == 0 and not done.stderr
    for name, (_, what) in package_command.COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(what)}$", done.stdout, re.MULTILINE)


def test_the_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron_fused_ce {megatron_fused_ce.__version__}\n")


@pytest.mark.parametrize("name", ["Llama-3-8B", "LLAMA-3-8b"])
def test_names_of_models_in_any_case(name):
    assert plan_of(["--model", name, "--seq-length", "4096"]).name == "llama-3-8b"


@pytest.mark.parametrize("close", ["llama3-8b", "llama-3-8B-base", "Llama 3 8b"])
def test_a_name_that_is_close_is_suggested(close):
    with pytest.raises(ValueError, match=r"no model .*; did you mean llama-3-8b\?"):
        plan_of(["--model", close, "--seq-length", "4096"])


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
