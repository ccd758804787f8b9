"""The adapter's flags, switch, launchers and import hook, and its ``main_grad``: what needs no model."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import megatron_fused_ce
from megatron_fused_ce import FusedCEConfig, autoload_start
from megatron_fused_ce.adapter import arguments, switch

ROOT = Path(__file__).resolve().parents[2]

# --- flags -----------------------------------------------------------------------------------------

#: Words behind --fused-chunked-ce, and the config, or what is said of them.
LINES = [
    ("", FusedCEConfig()),
    ("--fused-ce-memory-mb 512", FusedCEConfig(memory_mb=512)),
    ("--x --fused-ce-num-chunks 64 --fused-ce-strategy store --y 3", FusedCEConfig("store", num_chunks=64)),
    (
        "--fused-ce-merge packed --fused-ce-label-smoothing 0.1 --fused-ce-z-loss 1e-4 "
        "--fused-ce-logit-softcap 30 --fused-ce-ignore-index -100",
        FusedCEConfig(merge="packed", label_smoothing=0.1, z_loss=1e-4, logit_softcap=30.0,
                      ignore_index=-100),
    ),
    ("--fused-ce-mask-padded-vocab", FusedCEConfig(true_vocab_size=50257)),  # the tokenizer's
    ("--fused-ce-num-chunks 0", "a whole number from 1 to"),
    ("--fused-ce-label-smoothing 1", "below 1, got '1'"),
    ("--fused-ce-z-loss=-1e-4", "a number of 0 or more"),
    ("--fused-ce-z-loss nan", "a number of 0 or more"),
    ("--fused-ce-logit-softcap 0", "a number above 0"),
    ("--fused-ce-num-chunks x", "a whole number from 1 to"),
    ("--fused-ce-strategy fast", "invalid choice"),
    ("--fused-ce-memory-mb=2G", "1 to 1000000000, got '2G'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_a_config_of_a_command_line_or_one_line_and_status_2(line, expected, monkeypatch, capsys):
    tokenizer = types.SimpleNamespace(_GLOBAL_TOKENIZER=types.SimpleNamespace(vocab_size=50257))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", tokenizer)
    assert arguments.config_from_args(arguments.args_from_argv(line.split())) is None
    words = ["--fused-chunked-ce", *line.split()]
    if isinstance(expected, FusedCEConfig):
        assert arguments.config_from_args(arguments.args_from_argv(words)) == expected
        return
    with pytest.raises(SystemExit) as end:
        arguments.config_from_args(arguments.args_from_argv(words))
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and re.split("[ =]", line)[0] in said and expected in said


@pytest.mark.parametrize(
    ("defaults", "file", "line", "words"),
    [
        ({"fused_ce_z_loss": 1e-4}, "", "", "--fused-ce-z-loss: no effect without"),
        ({"fused_ce_z_loss": 1e-4}, "", "--fused-chunked-ce", ""),
        ({}, "fused_ce_z_loss: 1e-4\n", "--fused-chunked-ce", "fused_ce_z_loss has no effect there"),
        ({}, "model:\n  fused_chunked_ce: true\n", "", "fused_chunked_ce has no effect there"),
        ({}, "lr: 1 # fused_ce_z_loss: 1\n", "", ""),
        ({}, None, "", ""),  # none to be read: Megatron says so
    ],
)
def test_options_of_a_script_and_of_a_file(defaults, file, line, words, tmp_path, capsys):
    """Defaults that a script sets count as given; Megatron reads a file and tells nobody what it left out."""
    yaml = tmp_path / "model.yaml"
    if file is not None:
        yaml.write_text(file)
    parser = arguments.add_arguments(argparse.ArgumentParser())
    parser.add_argument("--yaml-cfg")
    parser = arguments.refuse_options_without_flag(parser)
    parser.set_defaults(**defaults)
    with pytest.raises(SystemExit) if words else contextlib.nullcontext():
        parser.parse_args([*line.split(), "--yaml-cfg", str(yaml)])
    assert words in capsys.readouterr().err


def test_two_flags_are_for_all_and_the_rest_stand_under_advanced():
    parser = arguments.add_arguments(argparse.ArgumentParser(add_help=False))
    titles = {of.title.rpartition("cross-entropy")[2]: of._group_actions for of in parser._action_groups}
    groups = {title: {action.option_strings[-1] for action in of} for title, of in titles.items()}
    assert groups[""] == {"--fused-chunked-ce", "--fused-ce-memory-mb"} and len(groups[", advanced"]) == 12
    page = (ROOT / "docs" / "options.md").read_text().split("## Strategies")[0]
    for title, text in zip(("", ", advanced"), page.split("### Advanced"), strict=True):
        assert groups[title] == set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))


# --- the switch ------------------------------------------------------------------------------------


def test_megatrons_arguments_come_before_the_command_line(monkeypatch):
    """Those of --yaml-cfg and of an older checkpoint do not have the names: then the command line counts, or
    the default. enable() without a config takes what counts."""
    monkeypatch.setattr(sys, "argv", ["x", "--fused-chunked-ce", "--fused-ce-num-chunks", "5"])
    parsed = argparse.Namespace(fused_chunked_ce=True, fused_ce_num_chunks=2)
    monkeypatch.setattr(arguments, "megatron_args", lambda: parsed)
    assert switch.active_config() == FusedCEConfig(num_chunks=2)
    parsed.fused_ce_trust = ["0123456789abcdef"]
    try:
        megatron_fused_ce.enable(trust="f" * 16)
        assert switch.active_config() == FusedCEConfig(num_chunks=2)
        assert switch.trusted() == {"0123456789abcdef", "f" * 16}
        megatron_fused_ce.enable(FusedCEConfig(), trust="f" * 16)
        assert switch.active_config() == FusedCEConfig() and switch.trusted() == {"f" * 16}
    finally:
        megatron_fused_ce.disable()
    for yaml in ({}, {"fused_chunked_ce": False}):
        monkeypatch.setattr(arguments, "megatron_args", lambda y=yaml: argparse.Namespace(**y))
        assert switch.active_config() == FusedCEConfig(num_chunks=5)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert switch.active_config() is None


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ("store", TypeError, "config must be a FusedCEConfig, got "),
        (FusedCEConfig, TypeError, "config must be a FusedCEConfig, got "),
        # Megatron's layer would not apply it where it makes real logits.
        (FusedCEConfig(logit_scale=0.5), ValueError, "under Megatron the model scales its logits"),
    ],
)
def test_what_enable_refuses(config, error, words):
    with pytest.raises(error, match=words):
        megatron_fused_ce.enable(config)
    assert switch.active_config() is None


# --- main_grad -------------------------------------------------------------------------------------

ADDED = {"grad_added_to_main_grad": False}


@pytest.mark.parametrize(
    ("dtype", "attributes", "kind", "beside"),
    [
        (torch.float32, ADDED, "main_grad", "a dummy"),
        (torch.bfloat16, ADDED, "low_main_grad", "a dummy"),
        (torch.float32, {**ADDED, "zero_out_wgrad": True}, "main_grad", "zeros"),  # a tied embedding adds
        (torch.float32, {}, "main_grad", "nothing"),  # nobody waits for it
        (torch.float32, {"main_grad": None}, "returned", ""),  # no DDP
    ],
)
def test_what_autograd_gets_beside_main_grad(dtype, attributes, kind, beside):
    """What main_grad gets: tests/op; without fusion, under FSDP: tests/parallel."""
    from megatron_fused_ce.adapter.main_grad import open_grad_weight_for

    weight = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
    vars(weight).update({"main_grad": torch.ones(7, 3, dtype=dtype), **attributes})
    opens = open_grad_weight_for(weight, True)
    assert getattr(opens, "kind", "returned") == kind
    if kind == "returned":
        return
    accumulator = opens(weight, 1, False)
    accumulator.add(torch.ones(5, 7).bfloat16(), torch.ones(5, 3).bfloat16())
    made = accumulator.close(None)
    assert torch.equal(weight.main_grad, torch.full((7, 3), 6, dtype=dtype))
    assert getattr(weight, "grad_added_to_main_grad", None) is (True if attributes else None)
    assert (made is None) == (beside == "nothing")
    assert made is None or (made.shape, made.dtype) == (weight.shape, weight.dtype)
    assert beside != "zeros" or not made.any()


# --- launches --------------------------------------------------------------------------------------

#: A stand-in for Megatron's parser module, and a script that parses with it.
PARSER = """import argparse
def add_megatron_arguments(parser):
    parser.add_argument('--lr', type=float)
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
SCRIPT = """import sys, os
from megatron.training.arguments import parse_args
if __name__ == '__main__':
    args = parse_args()
    print(args.lr, args.fused_chunked_ce, args.fused_ce_num_chunks)
    print(os.path.basename(sys.argv[0]), __file__ == sys.argv[0])
"""


@pytest.fixture
def script(tmp_path) -> Path:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "arguments.py").write_text(PARSER)
    script = tmp_path / "pretrain_fake.py"
    script.write_text(SCRIPT)
    return script


def run_python(*words, python=sys.executable, **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [str(python), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")


FLAGS = "--lr 0.5 --fused-chunked-ce --fused-ce-num-chunks 6"
ALONE = "--lr 0.5 --fused-ce-z-loss 1e-4 --fused-ce-skip-masked --fused-ce-merge packed"
REFUSED = "error: --fused-ce-z-loss, --fused-ce-skip-masked: no effect without --fused-chunked-ce"
#: Words behind ``python -m megatron_fused_ce``, status, and what is said.
LAUNCHES = [
    (f".launch SCRIPT {FLAGS}", 0, "0.5 True 6\npretrain_fake.py True\n"),
    (".launch SCRIPT --help", 0, "fused chunked cross-entropy"),
    # Options without the flag, unless they have their defaults, whatever comes first.
    (f".launch SCRIPT {ALONE}", 2, REFUSED),
    (f".launch SCRIPT {ALONE} --fused-chunked-ce", 0, ""),
    (".launch SCRIPT --lr 0.5 --fused-ce-merge packed", 0, ""),
    (".launch --help", 0, "--fused-ce-memory-mb"),
    (".launch no_such.py --fused-chunked-ce", 2, "no such script: no_such.py"),
    (" launch x.py", 2, "launch is torchrun's module"),
    (" no_such", 2, "no command 'no_such'"),
]


@pytest.mark.parametrize(("words", "status", "said"), LAUNCHES)
def test_launch(words, status, said, script):
    given = f"-m megatron_fused_ce{words}".replace("SCRIPT", str(script))
    done = run_python(*given.split())
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr


def test_autoload_makes_the_plain_command_work(tmp_path, script):
    """In an environment of its own: two files in site-packages, active only with the flag."""
    assert autoload_start.FLAGS == (arguments.FLAG, arguments.PREFIX)
    env_dir = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env_dir], check=True, capture_output=True)
    installed = sysconfig.get_paths()["purelib"]
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), installed))}

    def run(*words):
        return run_python(*words, python=env_dir / "bin" / "python", **env)

    def autoload(action):
        return run("-m", "megatron_fused_ce.autoload", action)

    launch = (script, *FLAGS.split())
    assert run(*launch).returncode == 2
    assert "not installed" in autoload("status").stdout
    assert "nothing removed" in autoload("remove").stdout
    assert autoload("install").returncode == 0
    assert run(*launch).stdout.splitlines()[0] == "0.5 True 6"
    assert REFUSED in run(script, *ALONE.split()).stderr
    loaded = "import sys; print('megatron_fused_ce' in sys.modules)"
    assert run("-c", loaded).stdout.strip() == "False"
    # Uninstalled, and the line stays behind: one line where the flag is, and Megatron's parser ends the run.
    env["PYTHONPATH"] = installed
    (file,) = env_dir.rglob("*.pth")
    assert file.with_suffix(".py").read_text() == Path(autoload_start.__file__).read_text()
    gone = run(*launch)
    assert gone.returncode == 2 and "unrecognized arguments" in gone.stderr
    assert "Traceback" not in gone.stderr and "Error processing line" not in gone.stderr
    said = "megatron_fused_ce is not installed any more, so --fused-chunked-ce is unknown: "
    said += f"install it again, or delete {file}"
    assert [line for line in gone.stderr.splitlines() if "not installed" in line] == [said]
    assert run("-c", "pass").stderr == ""
    env["TORCHELASTIC_RUN_ID"] = "1"  # a worker: its launcher has said so
    assert said not in run(*launch).stderr
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
    assert autoload("remove").stdout.startswith("removed: ")
    assert not list(env_dir.rglob("megatron_fused_ce*"))


def test_what_is_imported_already_or_reloaded_is_patched(script):
    """Once. A reload executes a module in the old one's dictionary, the mark of the patch included."""
    code = (
        f"import sys; sys.path.insert(0, {str(script.parent)!r}); sys.argv = ['x', *{FLAGS.split()!r}]\n"
        "import importlib\n"
        "import megatron.training.arguments as a\n"
        "from megatron_fused_ce.adapter import import_hook\n"
        "for reloads in (False, True, True):\n"
        "    assert not reloads or importlib.reload(a) is a\n"
        "    import_hook.install(); import_hook.install()\n"
        "    print(a.parse_args().fused_ce_num_chunks)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["6"] * 3, done.stderr
