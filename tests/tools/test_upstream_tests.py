"""scripts/dev/upstream_tests.py on a checkout of a few files: every way a test can end, off and on."""

from __future__ import annotations

import pytest

from megatron_fused_ce.scripts.dev import upstream_tests
from megatron_fused_ce.scripts.lib import results
from tests.support.commands import launches_without_torch, run_here

TESTS_OF_IT = """
import os, time
import pytest
from megatron_fused_ce.adapter import switch

@pytest.fixture
def breaks_afterwards():
    yield
    raise ValueError("at the end")

def test_passes(): pass
def test_fails(): assert 1 == 2, "as ever"
def test_breaks(breaks_afterwards): pass
def test_only_without(): assert switch.active_config() is None, "the flag is on"
def test_only_with(): assert switch.active_config() is not None, "the flag is off"
def test_evaluates(): switch.counters().fused += 3 * (switch.active_config() is not None)
def test_dies(): switch.active_config() is None or os._exit(3)
def test_between(): pass
def test_hangs(): time.sleep(1000 if switch.active_config() is not None else 0)
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_last(): pass
"""


#: verl's packages import what nobody has, its class has sizes, its process group is NCCL's.
VERL = {
    "verl/__init__.py": "import a_module_that_nobody_has",
    "verl/utils/__init__.py": "import a_module_that_nobody_has",
    "verl/utils/kernel/linear_cross_entropy.py": """
def linear_cross_entropy(hidden, weight, labels, temperature, reduction="none", group=None):
    raise RuntimeError("verl's")
""",
    "tests/utils/test_linear_cross_entropy.py": """
import tensordict, torch
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

def error_of(rank, group):
    torch.manual_seed(0)
    hidden = torch.randn(1, 5, 8, requires_grad=True)
    weight = torch.randn(12, 8)
    shard = weight.chunk(2)[rank] if group else weight
    labels = torch.randint(12, (1, 5))
    log_p = (hidden.double() @ weight.double().T / 1.5).log_softmax(-1)[0]
    expected = log_p.gather(1, labels.T)[:, 0], -(log_p.exp() * log_p).sum(-1)
    made = linear_cross_entropy(hidden, shard, labels, 1.5, "none", group)
    grads = [torch.autograd.grad(sum(x.sum() for x in pair), hidden)[0] for pair in (made, expected)]
    if group:
        torch.distributed.all_reduce(grads[0], group=group)
    return max((one - other).abs().max() for one, other in zip((*made, grads[0]), (*expected, grads[1])))
""",
    "tests/utils/test_special_linear_cross_entropy_tp.py": """
import torch
from test_linear_cross_entropy import error_of

class TestLinearCrossEntropy_TensorParallel:
    def __init__(self):
        torch.distributed.init_process_group(backend="nccl")
    def initialize(self, case):
        self.case = case
    def verify_kernel_correctness(self, iterations):
        assert error_of(torch.distributed.get_rank(), torch.distributed.group.WORLD) < 1e-5
        assert self.case != 4, "the last one"

def test_of_one_process(): pass
""",
}
#: slime's function takes logits.
SLIME = {
    "slime/utils/ppo_utils.py": """
def calculate_log_probs_and_entropy(logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask):
    log_p = logits.log_softmax(-1)
    kept = logits if log_prob_keep_mask is None else logits.masked_fill(~log_prob_keep_mask, float("-inf"))
    log_prob = kept.log_softmax(-1).gather(1, tokens[:, None])
    return log_prob, -(log_p.exp() * log_p).sum(-1)
""",
    "tests/test_ppo_logprob_entropy.py": """
import torch
import torch.multiprocessing as mp
from megatron_fused_ce.scripts.lib import gloo
from slime.utils import ppo_utils
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

def compare(rank, ranks, port, mask):
    if ranks > 1:
        where = f"tcp://127.0.0.1:{port}"
        gloo.use_one_thread()
        torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    logits = torch.randn(5, 12)
    tokens = torch.tensor([3, 0, 11, 6, 5])
    keep = (torch.rand(5, 12) < 0.5).scatter(1, tokens[:, None], True) if mask else None
    whole = logits.double().requires_grad_()
    log_p = whole.log_softmax(-1)
    kept = whole.masked_fill(~keep, float("-inf")) if mask else whole
    expected = kept.log_softmax(-1).gather(1, tokens[:, None]), -(log_p.exp() * log_p).sum(-1)
    own = logits.chunk(ranks, 1)[rank].clone().requires_grad_()
    own_keep = keep.chunk(ranks, 1)[rank] if mask else None
    made = calculate_log_probs_and_entropy(
        own, tokens, tp_group=None, with_entropy=True, chunk_size=-1, log_prob_keep_mask=own_keep
    )
    for pair in (made, expected):
        sum((x * torch.linspace(1, 2, 5).view(-1, *[1] * (x.dim() - 1))).sum() for x in pair).backward()
    for one, other in zip((*made, own.grad), (*expected, whole.grad.chunk(ranks, 1)[rank])):
        torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=0)

def test_one(): compare(0, 1, 0, False)
def test_masked(): compare(0, 1, 0, True)
def test_no_bound(): torch.testing.assert_close(torch.ones(1), torch.ones(1) + 0.5, atol=0, rtol=0)
def test_two():
    with __import__("socket").socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    mp.spawn(compare, args=(2, port, True), nprocs=2)
""",
}


def written_below(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    files = {
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 0\n",
        "megatron/core/__init__.py": "",
        "megatron/core/utils.py": "",
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/test_ends.py": TESTS_OF_IT,
        "tests/unit_tests/test_imports.py": "import a_module_that_nobody_has\n",
    }
    return written_below(tmp_path_factory.mktemp("checkout"), files)


def run(*words):
    with launches_without_torch():
        return run_here(upstream_tests.main, *words)


def test_every_way_to_end(checkout, tmp_path, monkeypatch):
    """And a second call, which finds everything done. As with a GPU: without torch there are no stand-ins."""
    monkeypatch.setattr(upstream_tests, "num_gpus", lambda: 1)
    files = ("test_ends.py", "test_imports.py")
    words = (checkout, "--ranks", 1, "--out", tmp_path / "out", "--jobs", 4)
    words += ("--test-timeout", 4, "--files", *files)
    done = run(*words)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    told = results.rows(tmp_path / "out" / "upstream_tests.json")
    rows = {(row["file"], row["test"]): row for row in told}
    verdicts = {test: row["verdict"] for (file, test), row in rows.items() if file == files[0]}
    assert verdicts == {
        "test_passes": "passed",
        "test_fails": "failed in both",
        "test_breaks": "failed in both",
        "test_only_without": "differs",
        "test_only_with": "differs",
        "test_evaluates": "passed",
        "test_dies": "differs",
        "test_between": "passed",
        "test_hangs": "differs",
        "test_skipped": "skipped",
        "test_last": "passed",
    }
    of_file = {test: row for (file, test), row in rows.items() if file == files[0]}
    assert of_file["test_evaluates"]["on"]["fused"] == 3
    assert of_file["test_evaluates"]["off"]["fused"] == 0
    assert "the flag is on" in of_file["test_only_without"]["on"]["message"]
    assert "teardown: ValueError: at the end" in of_file["test_breaks"]["off"]["message"]
    assert of_file["test_hangs"]["on"]["outcome"] == "hung"
    assert of_file["test_dies"]["on"]["outcome"] == "died"
    lost = rows[files[1], "(the file)"]
    assert lost["verdict"] == "not importable in both"
    assert "a_module_that_nobody_has" in lost["off"]["message"]
    assert told[0]["incomplete"] == [] and told[0]["megatron"] == "0.19.0"
    page = (tmp_path / "out" / "upstream_tests.md").read_text()
    assert page in done.stdout and upstream_tests.page_of([tmp_path / "out" / "upstream_tests.json"]) == page
    counts = next(line for line in page.splitlines() if line.startswith("| test_ends.py |"))
    assert counts.endswith("| 1 | 3 |  |"), "one test reached the head, three times"
    again = run(*words)
    assert again.returncode == 1
    assert results.rows(tmp_path / "out" / "upstream_tests.json") == told


def test_frameworks(tmp_path):
    """Ours in place of the functions that their tests call, over one and two ranks."""
    verl, slime = written_below(tmp_path / "v", VERL), written_below(tmp_path / "s", SLIME)
    files = ("test_special_linear_cross_entropy_tp.py", "test_ppo_logprob_entropy.py")
    words = (verl, slime, "--out", tmp_path / "out", "--jobs", 2, "--files", *files)
    done = run_here(upstream_tests.main, *words)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    told = results.rows(tmp_path / "out" / "upstream_tests.json")
    rows = {(row["ranks"], row["test"]): row for row in told}
    outcomes = {at: (row["off"]["outcome"], row["on"]["outcome"]) for at, row in rows.items()}
    case = "TestLinearCrossEntropy_TensorParallel"
    expected = {(2, f"{case}[{size}]"): ("failed", "passed") for size in range(4)}
    expected |= {(2, f"{case}[4]"): ("failed", "failed"), (1, "test_no_bound"): ("failed", "failed")}
    expected |= {(1, "test_one"): ("passed", "passed"), (1, "test_masked"): ("passed", "passed")}
    # slime's function here knows no ranks: ours is in its forked processes too.
    assert outcomes == expected | {(1, "test_two"): ("failed", "passed")}
    assert [rows[at]["on"]["fused"] for at in ((2, f"{case}[0]"), (1, "test_masked"))] == [2, 1]
    assert "verl's" in rows[2, f"{case}[0]"]["off"]["message"]
    assert rows[1, "test_no_bound"]["on"]["message"].startswith("call: Greatest absolute difference: 0.5")
    assert told[0]["checkouts"] == "verl (no git), slime (no git)"


def test_what_time_did_not_allow_is_not_counted(checkout, tmp_path):
    words = (checkout, "--ranks", 1, "--out", tmp_path, "--time-limit", 0.001)
    # By torchrun itself, which is not done before the first look at it.
    done = run_here(upstream_tests.main, *words, "--files", "test_ends.py")
    assert done.returncode == 0 and "Not done within the time limit: test_ends.py" in done.stdout


def written(path, incomplete=(), **tests):
    """A file of results: by test, its outcomes without and with the flag."""
    rows = []
    for name, pair in tests.items():
        outcomes = [upstream_tests.Outcome(one, f"call: {name}" * (one == "failed")) for one in pair]
        rows.append(upstream_tests.Row("a.py", name, 2, *outcomes).record())
    source = dict.fromkeys([*results.MADE_BY, "pytest"], "x") | {"commit": path.stem}
    results.write(path, rows, source | {"incomplete": list(incomplete)})
    return path


def test_a_page_joins_results(tmp_path):
    """The last run of a test counts; failures without the flag are told by their words."""
    first = written(tmp_path / "1.json", x=("passed", "failed"), y=("failed", "failed"))
    second = written(tmp_path / "2.json", ["b.py"], x=("passed", "passed"), z=("skipped", "skipped"))
    page = upstream_tests.page_of([first, second])
    assert page.startswith("commit 1 and 2, Megatron-LM x, device x,")
    assert "| a.py | 2 | 3 | 1 | 1 | 1 |  |  |  |" in page
    assert "Different with the flag: 0" in page
    assert "Fail without the flag too: 1" in page and "| 1 | y |" in page
    assert "Not done within the time limit: b.py." in page


def test_ranks_that_disagree():
    """The worse outcome counts, with its message; heads are summed."""
    passed = upstream_tests.Outcome("passed", fused=2)
    failed = upstream_tests.Outcome("failed", "call: no", fused=1)
    for pair in ((passed, failed), (failed, passed)):
        both = upstream_tests._over_ranks(*pair)
        assert (both.outcome, both.message, both.fused) == ("failed", "call: no", 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere",), "nowhere is no checkout of megatron, skyrl, nemo_rl, slime, verl"),
        (("--files", "test_none.py"), "no test_none.py among the checkouts' tests"),
        (("--ranks", "0"), "expected a whole number from 1"),
    ],
)
def test_mistakes(words, told, checkout, capsys):
    status = upstream_tests.main(
        [*words, "--files", "test_ends.py"] if words == ("nowhere",) else [str(checkout), *words]
    )
    assert status == 2 and told in capsys.readouterr().err
