"""Launch scripts and logs that ``plan`` reads: the arguments that it must find in each."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from megatron_fused_ce.plan import command, launch_script
from megatron_fused_ce.plan.command import setting_of
from megatron_fused_ce.plan.shell_script import Reader
from megatron_fused_ce.plan.shell_words import unknowns
from megatron_fused_ce.scripts.dev.megatron_records import version
from tests.support.checkouts import on_checkouts

OPTIONS = [name for action in command._parser(own=False)._actions for name in action.option_strings]
CASES = re.findall(
    r"^=== (.+)\n((?:.*\n)*?)((?:==> .*\n?)+)",
    Path(__file__).with_name("launch_scripts.txt").read_text(),
    re.MULTILINE,
)
assert len(CASES) >= 40, "the pattern finds them"
OF_MEGATRON = Path(__file__).with_name("megatron_scripts.txt")
BESIDE = {
    "model.sh": 'MODEL=(--num-layers "$LAYERS" --hidden-size "${HIDDEN:-64}")\n',
    "launch.sh": "launch() {\n  local script=$1\n  shift\n"
    '  exec torchrun --nproc-per-node 4 "$ROOT/$script" "$@"\n}\n',
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_arguments_and_gpus_of_a_script(case, tmp_path):
    _, script, expected = case
    for name, text in BESIDE.items():
        (tmp_path / name).write_text(text)
    for line in expected.splitlines():
        given = re.fullmatch(r"==> (?:with (.*?): )?(error|[\d?]+): (.*)", line)
        assert given, line
        values = dict(word.split("=", 1) for word in shlex.split(given[1] or ""))

        if given[2] == "error":
            with pytest.raises(ValueError, match=re.escape(given[3])):
                launch_script.of_script(script, values, OPTIONS, (), tmp_path)
            continue
        launch = launch_script.of_script(script, values, OPTIONS, (), tmp_path)
        assert shlex.join(launch.arguments) == shlex.join(shlex.split(given[3])), line
        assert str(launch.gpus or "?") == given[2]
        assert (launch.gpus is None) == bool(launch.no_gpus)
        marked = {name for name in ("xargs", "NVTE_FLASH_ATTN") if f"# {name}" in script}
        found = {*launch.doubts, *(name for name in launch.environment if name.startswith("NVTE"))}
        assert found == marked, line


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("A=xxxxxxxx\n" + 'A="$A$A"\n' * 60, "A has more than 1048576 letters"),
        ("A=(x)\n" + 'A+=("${A[@]}")\n' * 60, "A has more than 1048576 letters"),
        ("".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(30)) + "f0", "more than 100000 steps"),
        ("if x; then\n" * 2000 + "y\n" + "fi\n" * 2000, "too deep within each other"),
        ("(" * 5000, "line 1 cannot be read"),
        ("A=$((9**9**9**9))\nB=$((2**62*2**62*2**62))\npython a.py --num-layers $A$B", "known for A, B"),
        ("A=-5\nB=$((A / 2))\npython a.py --num-layers $B", "no value is known for B"),
        ("A=$((1 / 0))\npython a.py --num-layers $A", "no value is known for A"),
    ],
)
def test_a_script_without_end_ends(script, said):
    with pytest.raises(ValueError, match=said):
        launch_script.of_script(script, {}, OPTIONS)


# --- random scripts, and bash itself ----------------------------------------------------------------

#: Each ends with this call of four variables, each one word, and an array behind them.
LAST = 'launch "$A" "$B" "${C:-none}" "x$D" "${R[@]}"'
#: What each ``<word>`` may become; of a file ``x`` each test may go either way.
GRAMMAR = {
    "V": tuple("ABCD"),
    "value": (
        *("1", "2", "'x y'", '"a b"', '"${<V>}"', "$<V>", "${<V>:-7}", "${<V>:=8}", "${<V>:+z}"),
        *('"p ${<V>} q"', "$(echo 5)", "$((${N:-1} * 2 + 1))", '"${R[@]}"', '"${R[*]}"', "$1", '"$@"'),
    ),
    "assignment": (
        *("<V>=<value>", "<V>=<value>", "<V>+=<value>", "export <V>=<value>", "R+=(<value>)"),
        *("R=(<value> k)", ": ${<V>:=3}", "unset <V>"),
    ),
    "test": (
        *("[ -e x ]", "! [ -e x ]", '[ "$<V>" = 2 ]', "[[ -z $<V> ]]", '[[ "$<V>" == *b* ]]', "true"),
        *('test -n "$<V>"', "false", '[ "${<V>:-0}" -gt 1 ]', "[[ -n $<V> && ( $<V> != 1 || -e x ) ]]"),
    ),
    "block": ("<statement>", "<statement>\n<statement>", "<statement>\n<statement>\n<statement>"),
    "statement": (
        *["<assignment>"] * 10,
        *["if <test>; then\n<block>\nelif <test>; then\n<block>\nelse\n<block>\nfi"] * 3,
        *("<test> && <assignment>", "<test> || <assignment>", *["<test> && { <assignment>; <leave>; }"] * 3),
        'case "$<V>" in\n2|a*) <assignment> ;;\n*) <assignment> ;;\nesac',
        *["for <V> in 1 2; do\n<block>\ndone"] * 3,
        *("(\n<block>\n)", "<call>"),
    ),
    "call": ("f <value>",),
}


def random_script(seed: int) -> str:
    random = Random(seed)

    def made(word: str, depth: int = 0, leave: str = "") -> str:
        if word == "leave":
            return leave
        if (word == "statement" and not depth) or (word == "call" and leave != "exit 1"):
            word = "assignment"
        text, depth = random.choice(GRAMMAR[word]), depth - (word == "statement")
        leave = random.choice((leave, "break", "continue")) if text.startswith("for") else leave
        return re.sub("<(.*?)>", lambda found: made(found[1], depth, leave), text)

    blocks = made("block", 2, "return 0"), made("block", 3, "exit 1"), made("block", 3, "exit 1")
    return "f() {{\nlocal {}=4\n{}\n}}\n{}\n{}\n{}".format(made("V"), *blocks, LAST)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_what_is_taken_as_known_is_what_bash_does(tmp_path):
    """Assignments, tests, branches, loops and functions, each with the file that they test for there and not
    there: known words are bash's."""
    known = 0
    for seed in range(250):
        script = random_script(seed)
        reader = Reader({}, None, {})
        reader.read(script)
        launches = [words[1:] for words, *_ in reader.found if words[0] == "launch"]
        for there in (False, True):
            (tmp_path / "x").unlink(missing_ok=True)
            if there:
                (tmp_path / "x").touch()
            done = subprocess.run(
                ["bash", "-c", f"launch() {{ printf '%s\\0' \"$@\"; }}\n{script}"], cwd=tmp_path, text=True,
                env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
            words = done.stdout.split("\0")[:-1]
            if not words:  # it ends before the launch
                continue
            (found,) = launches
            single = [(one, other) for one, other in zip(found[:4], words, strict=False) if not unknowns(one)]
            assert all(one == other for one, other in single), (script, found, words)
            if not any(map(unknowns, found[4:])):
                assert found[4:] == words[4:], (script, found, words)
            known += len(single)
    assert known > 250


@on_checkouts
def test_megatrons_own_scripts_that_plan(checkout):
    release = version(Path(checkout))
    listed = (line.split("; ") for line in OF_MEGATRON.read_text().splitlines()[2:])
    rows = [row for versions, *row in listed if release in versions.split()]
    assert rows, f"{OF_MEGATRON} has no Megatron {release}"
    for path, added, sizes in rows:
        one = setting_of(["--from-launch", f"{checkout}/{path}", *added.split()])
        found = one.parallel.gpus, one.model.num_layers, one.model.hidden_size, one.training.sequence
        assert " ".join(map(str, found)) == sizes, (path, added)
