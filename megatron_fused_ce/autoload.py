"""The opt-in step that makes a plain ``torchrun pretrain_gpt.py ... --fused-chunked-ce`` work.

::

    python -m megatron_fused_ce autoload install | status | remove

``install`` writes two files into this environment's ``site-packages``: a .pth file, which imports the other,
a copy of :mod:`.autoload_start`. Python then installs the import hook at start-up, and only in processes
whose command line holds ``--fused-chunked-ce`` or a ``--fused-ce-*``, which is an error by itself.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

NAME = "megatron_fused_ce_autoload"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fused_ce autoload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("install", "status", "remove"))
    action = parser.parse_args(argv).action
    file = Path(sysconfig.get_paths()["purelib"]) / f"{NAME}.pth"
    module = file.with_suffix(".py")
    was_there = file.is_file()
    try:
        if action == "install":
            module.write_text(Path(__file__).with_name("autoload_start.py").read_text())
            file.write_text(f"import {NAME}\n")
        elif action == "remove":
            for made in (file, module, Path(cache_from_source(module))):
                made.unlink(missing_ok=True)
    except OSError as error:
        print(
            f"cannot write {file}: {error.strerror}; use an environment of your own, or launch with "
            "-m megatron_fused_ce.launch",
            file=sys.stderr,
        )
        return 2
    state = "installed" if file.is_file() else "not installed"
    if action == "remove":
        state = "removed" if was_there else "was not installed, nothing removed"
    print(f"{state}: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
