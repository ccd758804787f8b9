"""Shell scripts of Megatron-LM itself that ``plan --from-launch`` reads, and what it finds in each.

``python -m tests.support.megatron_scripts CHECKOUT...`` writes the list anew, from one checkout a version;
``tests/plan/test_launch_scripts.py`` compares it with the checkouts that ``MEGATRON_LM_PATH`` names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_fused_ce.plan.command import setting_of
from megatron_fused_ce.scripts.dev.megatron_records import version

LIST = Path(__file__).parents[1] / "plan" / "megatron_scripts.txt"
#: What a script that its author leaves open may need: a tokenizer's size, and a cluster's.
ADDED = ("", "--vocab-size 32000", "--vocab-size 32000 --gpus 64", "--vocab-size 32000 --gpus 1024")


def found(script: Path, added: str) -> str:
    """GPUs, layers, hidden size and tokens; "" if the script cannot be planned."""
    try:
        one = setting_of(["--from-launch", str(script), *added.split()])
    except (OSError, ValueError, SystemExit):
        return ""
    sizes = (one.parallel.gpus, one.model.num_layers, one.model.hidden_size, one.training.sequence)
    return " ".join(map(str, sizes))


if __name__ == "__main__":
    held: dict[tuple[str, str, str], list[str]] = {}
    for checkout in map(Path, sys.argv[1:]):
        for script in checkout.rglob("*.sh"):
            tried = ((str(script.relative_to(checkout)), added, found(script, added)) for added in ADDED)
            if row := next((row for row in tried if row[-1]), None):
                held.setdefault(row, []).append(version(checkout))
    lines = [f"{' '.join(held[row])}; {'; '.join(row)}" for row in sorted(held)]
    LIST.write_text("\n".join([*LIST.read_text().splitlines()[:2], *lines]) + "\n")
