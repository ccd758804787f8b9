"""The opt-in step after which a plain ``torchrun pretrain_gpt.py ... --fused-chunked-ce`` works.

::

    python -m megatron_fused_ce.autoload install | status | remove

``install`` writes one line into this environment's ``site-packages``: Python then installs the import
hook at start-up, and only in processes whose command line holds ``--fused-chunked-ce``.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from megatron_fused_ce.adapter.arguments import FLAG

#: Run by ``site`` at every start of Python: short, and without effect unless the flag is there.
LINE = (
    f"import sys; {FLAG!r} in getattr(sys, 'argv', ()) and "
    "__import__('megatron_fused_ce.adapter.import_hook', fromlist=['install']).install()\n"
)


def path() -> Path:
    """Where the line is written."""
    return Path(sysconfig.get_paths()["purelib"]) / "megatron_fused_ce_autoload.pth"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fused_ce.autoload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("install", "status", "remove"))
    action = parser.parse_args(argv).action
    file = path()
    try:
        if action == "install":
            file.write_text(LINE)
        elif action == "remove":
            file.unlink(missing_ok=True)
    except OSError as error:
        print(
            f"cannot write {file}: {error.strerror}; use an environment of your own, or launch with "
            "-m megatron_fused_ce.launch",
            file=sys.stderr,
        )
        return 2
    state = "installed" if file.is_file() else "not installed"
    print(f"{state}: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
