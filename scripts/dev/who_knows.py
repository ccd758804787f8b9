"""Which files of the package know a loss, beside config.py, the planner and the public functions.

    python scripts/dev/who_knows.py [CHECKOUT]

A file knows a loss that it names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: Loss -> its names in code.
NAMES = {
    "z-loss": r"z_loss|ZLoss",
    "label smoothing": r"label_smoothing|Uniform",
    "several labels": r"\bseveral\b[:.=]|[sS]everal_?[lL]abels|LabelSet|label_set|label_shifts",
    "top-k targets": r"SoftTargets|TeacherTargets|target_mass|merge_duplicates|shares\b",
    "sum of squares": r"sum_p_squared|SumSquares|with_squares",
    "divergences": r"[Tt]eacher|[Dd]ivergence|[Dd]istillation",
    "sampling mask": r"sampling_mask|mask_ids|MaskedLogProbs|Keep\.Pairs",
}
#: Where each may be known beside.
APART = (
    "config.py",
    "head_bytes.py",
    "planner.py",
    "op.py",
    "rl.py",
    "__init__.py",
    "adapter/",
    "plan/",
    "kernels/",
)


def main(root: Path) -> None:
    package = root / "megatron_fused_ce"
    files = [
        file for file in sorted(package.rglob("*.py")) if "scripts" not in file.relative_to(package).parts
    ]
    code = {str(file.relative_to(package)): file.read_text() for file in files}
    for loss, names in NAMES.items():
        found = [name for name, text in code.items() if re.search(names, text) and not name.startswith(APART)]
        print(f"{loss}: {len(found)}: {', '.join(found)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
