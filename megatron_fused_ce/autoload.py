"""The opt-in step that makes a plain ``torchrun pretrain_gpt.py ... --fused-chunked-ce`` work.

::

    python -m megatron_fused_ce autoload install | status | remove

``install`` writes one line into this environment's ``site-packages``: Python then installs the import
hook at start-up, and only in processes whose command line holds ``--fused-chunked-ce`` or a
``--fused-ce-*``, which is an error by itself.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from megatron_fused_ce.adapter.arguments import FLAG, PREFIX

#: Run by ``site`` if a flag is on the command line. The package may have been uninstalled since; under
#: torchrun the launcher has already said so.
_CODE = """
import os, sys
try:
    from megatron_fused_ce.adapter.import_hook import install
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("megatron_fused_ce"):
        raise
    if "TORCHELASTIC_RUN_ID" not in os.environ and not hasattr(sys, "megatron_fused_ce_is_missing"):
        sys.megatron_fused_ce_is_missing = True  # site may run a .pth file of lib and of lib64
        print("megatron_fused_ce is not installed any more, so {flag} is unknown: install it again, or "
              "delete {file}", file=sys.stderr)
else:
    install()
"""


def line() -> str:
    """The line that ``site`` runs at every start of Python: short, and without effect unless one of the
    flags is given."""
    code = _CODE.format(flag=FLAG, file=path())
    given = f"any(word.startswith({(FLAG, PREFIX)!r}) for word in getattr(sys, 'argv', ()))"
    return f"import sys; {given} and exec({code!r}, {{}})\n"


def path() -> Path:
    """Path of the file with that line."""
    return Path(sysconfig.get_paths()["purelib"]) / "megatron_fused_ce_autoload.pth"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fused_ce autoload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("install", "status", "remove"))
    action = parser.parse_args(argv).action
    file = path()
    was_there = file.is_file()
    try:
        if action == "install":
            file.write_text(line())
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
    if action == "remove":
        state = "removed" if was_there else "was not installed, nothing removed"
    print(f"{state}: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
