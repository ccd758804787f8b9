"""Megatron's own training loop at TP 2, flag off and on: arguments, log, evaluation, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fused_ce.scripts.lib.launches import NO_FUSED_WGRAD, UNTIED
from tests.megatron.launches import BASE_ARGS, by_torchrun, exact_lines, told_by_ranks, words_of
from tests.support import forked_launches
from tests.support.megatron import CORE_0_19

#: Not in tests/support: beside a script its folder comes first, and megatron.py is a module there.
SCRIPT = Path(__file__).with_name("pretrain.py")

pytestmark = pytest.mark.skipif(
    not CORE_0_19.is_dir(), reason=f"no {CORE_0_19.name} in the environment: scripts/dev/setup_env.sh"
)

ARGUMENTS = f"""{BASE_ARGS} --num-layers 2 --sequence-parallel {UNTIED} {NO_FUSED_WGRAD}
    --hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 --train-iters 8 --lr 1e-2
    --eval-iters 0 --eval-interval 4 --save-interval 2 --ckpt-format torch_dist
"""
GRAD_IN_FORWARD = "--fused-chunked-ce --fused-ce-strategy grad_in_forward --fused-ce-num-chunks 3"


@pytest.fixture(scope="module")
def forks():
    return forked_launches.Server(CORE_0_19)


@pytest.fixture
def launch(forks, tmp_path):
    """What a script prints on two ranks, which find Megatron imported, or are torchrun's."""

    def launch(script, *flags, torchrun=False):
        words = words_of(script, *ARGUMENTS.split(), *flags)
        if torchrun:
            status, output = by_torchrun(words, tmp_path, CORE_0_19)
        else:
            status, output = forks.launch(words, tmp_path, ranks=range(2), WORLD_SIZE="2")
        assert status == 0, f"{flags}: {told_by_ranks(output)}"
        return output

    return launch


#: Flags of each launch after the first, which trains 8 iterations without any. Each goes on for two. That
#: with the flag is torchrun's; the others find Megatron imported.
LEGS = {"on": f"{GRAD_IN_FORWARD} --eval-iters 1", "off again": ""}


def test_flag_off_and_on_across_checkpoints(tmp_path, launch):
    """Losses and gradient norms are those of the one run without the flag, whichever leg saved."""
    output = launch(SCRIPT, "--save", str(tmp_path / "after 2"))
    whole = exact_lines(output)
    assert [line["iteration"] for line in whole] == list(range(1, 9))
    assert whole[-1]["lm loss"] < whole[0]["lm loss"] - 0.3, "it has to learn to tell a wrong step"
    assert "[fused-ce]" not in output
    (tmp_path / "after 2" / "latest_checkpointed_iteration.txt").write_text("2")
    printed = {}
    for number, (leg, flags) in enumerate(LEGS.items(), start=1):
        start, end = 2 * number, 2 * number + 2
        flags = [*flags.split(), "--exit-interval", str(end), "--load", str(tmp_path / f"after {start}")]
        printed[leg] = launch(SCRIPT, *flags, "--save", str(tmp_path / f"after {end}"), torchrun=leg == "on")
        lines = exact_lines(printed[leg])
        assert [line["iteration"] for line in lines] == [start + 1, end], leg
        for line, expected in zip(lines, whole[start:end], strict=True):
            for name in ("lm loss", "grad norm"):
                assert line[name] == pytest.approx(expected[name], rel=2e-6), (leg, name)
    # Two iterations of two micro-batches, and two more are evaluated.
    assert "heads: 6 fused, 0 on the stock path; logits materialised: 0" in printed["on"]
    assert "[fused-ce]" not in printed["off again"]
    saved = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".distcp" for file in saved)
    assert not any(b"megatron_fused_ce" in file.read_bytes() for file in saved), (
        "a checkpoint has to load where the package is not installed"
    )


@pytest.mark.rest
def test_a_loss_that_is_not_the_masked_sum(tmp_path, launch):
    """One token counts twice: ``grad_in_forward`` trains as ``recompute`` does, and says so once."""
    source = SCRIPT.read_text()
    loss = "(losses.float() * loss_mask).sum()"
    assert source.count(loss) == 1
    script = tmp_path / "pretrain.py"
    script.write_text(source.replace(loss, f"{loss} + losses[0, 3]"))
    lines, told = {}, {}
    for strategy in ("recompute", "grad_in_forward"):
        told[strategy] = launch(script, *GRAD_IN_FORWARD.replace("grad_in_forward", strategy).split())
        lines[strategy] = exact_lines(told[strategy])
    assert len(lines["recompute"]) == 8
    for line, expected in zip(lines["grad_in_forward"], lines["recompute"], strict=True):
        for name in ("lm loss", "grad norm"):
            assert line[name] == pytest.approx(expected[name], rel=2e-6), name
    assert told["grad_in_forward"].count("is not a scalar times the token weights") == 1
    assert "gradients of grad_in_forward made again: 1" in told["grad_in_forward"]
    assert "token weights" not in told["recompute"] and "made again" not in told["recompute"]
