"""Lines of Python and shell: no folder has more than tests/budget.txt says. Numbers there only fall."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lines_of(folder: Path) -> int:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".sh") and path.is_file()]
    linked = [path for path in folder.iterdir() if path.is_symlink()]
    own = (path for path in paths if not any(path.is_relative_to(link) for link in linked))
    return sum(len(path.read_text().splitlines()) for path in own)


def test_nothing_grows_past_its_budget():
    rows = (line.split() for line in Path(__file__).with_name("budget.txt").read_text().splitlines())
    found = {name: (lines_of(ROOT / name), int(most)) for most, name in rows}
    assert not {name: pair for name, pair in found.items() if pair[0] > pair[1]}, "(lines, allowed)"


def test_lines_are_counted_once(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "long.py").write_text("\n" * 401)
    (tmp_path / "short.sh").write_text("\n" * 400)
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    assert lines_of(tmp_path) == 801
