"""Lines of the tree: no folder, and no file above 400 lines, has more than tests/budget.txt says.

    python -m tests.test_budget

writes the file anew. A number may rise in a commit that says what for; when lines go, it goes down with them.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_name("budget.txt")
FOLDERS = ("docs", "kernels", "megatron_fused_ce", "scripts", "tests")
#: Of a file that the budget does not name.
MOST_LINES = 400


def lines_of(root: Path) -> dict[str, int]:
    """Lines of every folder, those below it included, and of each long file: Python and shell, no links."""
    counts: Counter[str] = Counter()
    for top in FOLDERS:
        for here, _, names in os.walk(root / top):
            for path in (Path(here, name) for name in names if name.endswith((".py", ".sh"))):
                if path.is_symlink():
                    continue
                count, name = len(path.read_text().splitlines()), path.relative_to(root)
                counts.update({f"{folder.as_posix()}/": count for folder in name.parents})
                if count > MOST_LINES:
                    counts[name.as_posix()] = count
    return dict(sorted(counts.items()))


def too_long(found: dict[str, int], budget: str) -> list[str]:
    """What has more lines than the budget allows; a folder that it does not name has to be empty."""
    allowed = dict.fromkeys(found, MOST_LINES) | {name: 0 for name in found if name.endswith("/")}
    allowed |= {name: int(count) for count, name in map(str.split, budget.splitlines())}
    return [f"{name}: {n} lines, {allowed[name]} allowed" for name, n in found.items() if n > allowed[name]]


def test_nothing_grows_past_its_budget():
    assert not too_long(lines_of(ROOT), BUDGET.read_text()), "fewer lines, or python -m tests.test_budget"


def test_what_grows_is_told(tmp_path):
    (tmp_path / "scripts" / "new").mkdir(parents=True)
    (tmp_path / "scripts" / "long.py").write_text("\n" * 401)
    (tmp_path / "scripts" / "new" / "short.sh").write_text("\n" * 400)
    (tmp_path / "scripts" / "link.py").symlink_to(tmp_path / "scripts" / "long.py")
    found = lines_of(tmp_path)
    assert found == {"./": 801, "scripts/": 801, "scripts/long.py": 401, "scripts/new/": 400}
    assert too_long(found, "801 ./\n801 scripts/\n400 scripts/new/\n401 scripts/long.py\n") == []
    told = too_long(found, "801 ./\n800 scripts/\n")
    assert [line.partition(":")[0] for line in told] == ["scripts/", "scripts/long.py", "scripts/new/"]


if __name__ == "__main__":
    BUDGET.write_text("".join(f"{count:6d} {name}\n" for name, count in lines_of(ROOT).items()))
