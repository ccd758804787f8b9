"""``python -m megatron_fused_ce plan``: launches that it reads, what it prints, and what it refuses."""

from __future__ import annotations

import functools
import json
import operator
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
from tests.support.launches import LAUNCHES

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128"
OF_T5 = TINY.replace("--num-layers", "--encoder-num-layers")
EXAMPLES = sorted(path for path in (ROOT / "scripts" / "examples").glob("*.sh") if path.stem != "launch")


# --- launches: what is read of scripts is in tests/plan/launch_scripts.txt ---------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_planned_and_have_the_models_size(example):
    """GPUs and parameters are those that tests/tools/test_examples.py finds through Megatron's own parser."""
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


# --- Megatron's arguments --------------------------------------------------------------------


MANY = (
    f"{TINY} --swiglu --group-query-attention --num-query-groups 2 --kv-channels 32 --normalization RMSNorm"
    " --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope"
    " --mtp-num-layers 1 --micro-batch-size 2 --gpus 8 --tp 2 --cp 2 --sequence-parallel"
    " --global-batch-size 16 --recompute-granularity full --recompute-method block"
    " --recompute-num-layers 1 --num-experts 8 --moe-ffn-hidden-size 32 --ep 4 --moe-layer-freq [0]+[1]*1"
)
BYTES = "training.gradient_bytes training.state_bytes training.step_bytes"
OPTIMIZER = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
LAUNCHED = (
    f"--from-launch 'torchrun --nproc-per-node=4 pretrain_gpt.py {TINY} --tp 2 --bf16' --seq-length 256"
)
#: Arguments, sizes of a setting, and what they are.
SIZES = [
    (MANY, "model.num_query_groups model.head_dim model.ffn_hidden_size", 2, 32, 128),
    (MANY, "model.gated model.tied model.rms_norm model.linear_bias", True, False, True, False),
    (MANY, "model.rotary model.learned_positions model.mtp_num_layers", True, 0, 1),
    (MANY, "parallel.data parallel.context parallel.sequence_parts num_tokens", 2, 2, 2, 2 * 128 // 2),
    (MANY, "training.num_micro_batches model.mixture.layers", 16 // 2 // 2, (False, True)),
    (MANY, "training.recompute", Recompute(full=True, num_layers=1, block=True)),
    (f"{TINY} --num-experts 8 --moe-layer-freq 2", "model.mixture.layers", (True, False)),
    # Defaults are Megatron's: as many groups as heads, four times the hidden size, learned positions.
    (f"{TINY} --num-query-groups 2", "model.num_query_groups model.ffn_hidden_size", 4, 256),
    (TINY, "model.learned_positions", 128),
    (f"{TINY} --quick-geglu", "model.gated model.ffn_hidden_size", True, 256),
    (f"{TINY} --no-position-embedding", "model.learned_positions", 0),
    (f"{TINY} --position-embedding-type rope", "model.learned_positions", 0),
    # Of a launch: a mask, dropout, nothing sharded; numbers behind it. Of a named model the usual settings.
    (LAUNCHED, "parallel.gpus parallel.tensor parallel.data training.sequence", 4, 2, 2, 256),
    (LAUNCHED, "training.dtype training.attention_mask training.hidden_dropout", "bfloat16", True, True),
    (LAUNCHED, "training.distributed_optimizer", False),
    (
        "--model LLAMA-3-8b --seq-length 64 --num-layers 2",
        "model.num_layers training.hidden_dropout",
        2,
        False,
    ),
    ("--model gemma-2-2b --seq-length 64", "training.fused_ce.logit_softcap", 30),
    # Hybrids, by a pattern and by the program.
    (f"{TINY} --hybrid-layer-pattern M*|-M/*-/*- --pp 2", "model.num_layers model.pattern", 4, "M*-M"),
    (f"{TINY} --hybrid-layer-pattern M/*-/*-", "model.mtp_num_layers model.prediction_pattern", 2, "*-"),
    (f"{TINY} --hybrid-layer-pattern M --mamba-head-dim 16", "model.state_space.num_heads", 8),
    (f"--from-launch 'pretrain_mamba.py {TINY}'", "model.pattern", "MM"),
    (
        "--model llama-3-8b --gpus 8 --seq-length 64 --num-distributed-optimizer-instances 4",
        "parallel.optimizer_instances",
        4,
    ),
    # Of a parameter.
    (f"--from-launch '{TINY} --bf16'", BYTES, 4, 12, 0),
    (f"--from-launch '{TINY}'", BYTES, 4, 8, 0),
    (f"--from-launch '{TINY} --fp16'", BYTES, 2, 12, 4),
    (f"--from-launch '{TINY} --bf16 --grad-reduce-in-bf16'", BYTES, 2, 12, 4),
    (f"--from-launch '{TINY} --bf16 {OPTIMIZER}'", BYTES, 4, 7, 0),
]


@pytest.mark.parametrize(("words", "names", "expected"), [(row[0], row[1], row[2:]) for row in SIZES])
def test_arguments_become_sizes(words, names, expected):
    one = setting_of(shlex.split(words))
    assert tuple(operator.attrgetter(name)(one) for name in names.split()) == expected


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
    found = peaks.stages(setting_of([*shlex.split(TINY), *words]))
    assert [[len(chunk) for chunk in stage.chunks] for stage in found] == layers
    # A stage without layers, or without its last ones, can be planned.
    plan_of([*shlex.split(TINY), *words])


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


def test_a_model_that_cannot_be_planned_has_a_head():
    """Layers and heads that do not divide, unknown letters or programs: the head of a plain model."""
    launch = f"{TINY} --bf16 --fp8-format e4m3 --num-attention-heads 7 --kv-channels 8 --num-layers 7"
    found = plan_of(["--from-launch", f"{launch} --hybrid-layer-pattern XYZ --tp 2 --pp 2", "--gpus", "4"])
    plain = plan_of(["--from-launch", f"{TINY} --bf16 --tp 2 --pp 2", "--gpus", "4"])
    assert found.doubts and found.advice.baseline.head == plain.advice.baseline.head
    for launch in (f"xargs pretrain_gpt.py {TINY} --bf16", f"pretrain_t5.py {OF_T5} --bf16"):
        found, plain = (plan_of(["--from-launch", one, "--gpus", "2"]) for one in (launch, f"{TINY} --bf16"))
        heads_of = [[way.head.peak for way in one.advice.ways[:3]] for one in (found, plain)]
        assert found.doubts and heads_of[0] == heads_of[1]
    in_fp32 = plan_of(["--from-launch", f"pretrain_gpt.py {TINY}", "--gpus", "2"])
    assert "attention in fp32" in in_fp32.doubts[0]


#: Of another kind in a later version, whose the file has.
LATER = {"rampup_batch_size", "rl_use_sequence_packing", "lazy_mpu_init", "cuda_graph_scope",
         "export_kv_cache_quant"}  # fmt: skip


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


# --- tests/plan/answers.tsv ------------------------------------------------------------------

ANSWERS = Path(__file__).with_name("answers.tsv").read_text().splitlines()
STAYS = "No effect: "
NAMES = {
    "{tiny}": TINY,
    "{t5}": OF_T5,
    "{no_vocabulary}": TINY.replace("--vocab-size 256 ", ""),
    "{model}": "--model llama-3-8b --seq-length 8192",
}


@pytest.fixture
def scripts(tmp_path, monkeypatch) -> Path:
    """The folder that a plan is made in."""
    asks = f"SIZE=8b\nS=$(cat seq)\npython pretrain_gpt.py {TINY} --seq-length $S --lr $(cat lr)\n"
    (tmp_path / "train.sh").write_text(asks)
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("row", [row for row in ANSWERS if not row.startswith("#")])
def test_what_a_plan_answers(row, capsys, scripts):
    """Bad input is one line and status 2; what is not counted takes the verdict (3), unless somebody vouches
    for the argument, by its name with or without dashes. The head's numbers come in any case; nothing is said
    of the flag where the head stays with Megatron (tests/megatron/test_stock_path.py builds such heads)."""
    status, said, line = row.split("\t")
    for name, text in NAMES.items():
        line = line.replace(name, text)
    words, before = shlex.split(line), sorted(scripts.iterdir())
    assert command.main(words) == int(status)
    out, error = capsys.readouterr()
    assert sorted(scripts.iterdir()) == before
    if status == "2":
        assert error.startswith("plan: ") and error.count("\n") == 1 and said in error and not out
        return
    found, stays = plan_of(words), said.startswith(STAYS)
    first = sentences(found)[0].text
    assert " ".join(out.split()).startswith(" ".join(first.split())) and said.removeprefix(STAYS) in first
    assert first.startswith(f"{STAYS}the head stays on Megatron's own path: ") == stays
    assert bool(answer.as_dictionary(found)["no_effect"]) == ("--fused-chunked-ce," not in out) == stays
    assert ("how" in dict(sentences(found, explain=True))) != stays
    assert ("no verdict, " in first) == (status == "3") and found.advice.baseline.head.peak > 0
    names = found.judged.uncounted
    if said.startswith("layers of kind") or OF_T5 in line:  # without them there is no model
        return
    for vouched in (names, [name.lstrip("-") for name in names]):
        assert not plan_of([*words, *(word for name in vouched for word in ("--ignore", name))]).doubts


def test_what_a_script_lacks_is_given_beside_it(scripts, capsys, monkeypatch):
    plan = ["--from-launch", "train.sh", "--json"]
    for given in (["--set", "S=64"], ["--seq-length", "64"]):
        assert setting_of([*plan, *given]).training.sequence == 64
    # Two that are given otherwise, at the end.
    last = scripts / "last.sh"
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
    sizes = "--tokens 32768 --hidden 4096 --vocab 128256 --device H200"
    assert "predicted peak" in run("plan-head", *sizes.split(), before=blocked).stdout
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
    words = f"{pretrain.model_args('llama-3-8b:2')} {pretrain.COMMON_ARGS} --seq-length 128"
    model = setting_of(["--model", "llama-3-8b", "--seq-length", "128"]).model
    # The tokenizer adds its end of document.
    assert setting_of(["--from-launch", words]).model == replace(model, num_layers=2, vocab_size=128255)
