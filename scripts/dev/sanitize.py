"""The kernels under compute-sanitizer's memcheck and racecheck: the tests that are marked `sanitize`.

    python -m scripts.dev.sanitize [PYTEST'S WORDS]

First each tool is shown a kernel with the error that it looks for (sanitize_kernels.py): one that overlooks
it proves nothing. Where the tool is refused (a container without the right to trace) or is not here, this is
skipped, and said. Every kernel of kernels/ must have been launched.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: torch's caching allocator cuts tensors out of large blocks, and the
tools know whole blocks only. An access behind a tensor's end would land in its neighbour. racecheck sees
accesses of threads to shared memory, and not those of TMA (``cp.async.bulk.tensor``) and ``wgmma``. It is
slow (60 of these 536 tests in eight minutes on an H100), so it gets each test function's first and last case;
and it reports cuBLAS's own kernels, which do not count.

The tools' logs stay in build/sanitize. Exit status: 0 clean or skipped, 1 a finding, a test that fails or a
kernel that was never launched, 2 no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_fused_ce.command_line import command, require_gpus
from megatron_fused_ce.scripts.lib.results import PACKAGE, REPOSITORY

#: By tool: the wrong kernel that it must report.
TOOLS = {"memcheck": "_wrong_bounds_kernel", "racecheck": "_wrong_race_kernel"}
#: The right kernel that racecheck reports, and the product for Hopper, whose warps hand over in the same way.
RIGHT, LIKE_RIGHT = "_right_handover_kernel", "_gemm_kernel"
#: How a finding begins; lines below it are indented.
FINDING = re.compile(
    r"(?i)(Invalid|Misaligned|Potential|Barrier error|Deadlock|(Error|Warning): .*(race|hazard))"
)
#: What a tool says when it could not do all of its work, and when it could not begin.
BROKEN = re.compile(r"^=+ (Internal|Fatal|Device not|Warning: Detected overflow).*", re.MULTILINE)
REFUSED = re.compile(r"^=+ (Internal|Fatal|Device not|Error: (Target|No attach|Unable|Fail)).*", re.MULTILINE)
#: Where: "at NAME+0x10", "at 0x10 in NAME(...)".
WHERE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?([^\n]+?)(?:\(|\+0x|<| in |$)")
LOGS = Path("build/sanitize")
PLUGIN = "megatron_fused_ce.scripts.dev.sanitize"
LAUNCHED = "launched kernels:"


def findings(log: str) -> Counter[str]:
    """How often a tool reported something, by the kernel in which it happened."""
    found: list[str] = []
    for line in log.splitlines():
        told = line.removeprefix("=========")
        if told == line:
            continue
        if told.startswith(" ") and not told.startswith("  ") and FINDING.match(told.strip()):
            found.append("")
        if found and not found[-1] and (where := WHERE.search(told)):
            found[-1] = where[1].strip()
    return Counter(found)


def kernels() -> set[str]:
    """Compiled functions that the host launches, by their names."""
    text = "\n".join(file.read_text() for file in (PACKAGE / "kernels").glob("*.py"))
    return set(re.findall(r"jit.*\ndef (_\w+_kernel)\(", text))


def run(sanitizer: str, tool: str, name: str, words: list[str]) -> tuple[int, str]:
    """Exit status and log of ``python -m words...`` under the tool."""
    command = [sanitizer, "--tool", tool, "--show-backtrace", "no", "--print-limit", "10000"]
    # The compilers that Triton starts have nothing to be checked; torch asks CUDA for what may be missing.
    command += ["--target-processes", "application-only", "--report-api-errors", "no", sys.executable, "-m"]
    ours = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    ours["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{tool}-{name}.log").open("w+", errors="replace") as log:
        done = subprocess.run([*command, *words], env={**os.environ, **ours}, stdout=log, stderr=log)
        log.seek(0)
        return done.returncode, log.read()


@command("sanitize")
def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    require_gpus()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("SKIPPED compute-sanitizer: not here; it comes with the CUDA toolkit")
        return 0
    clean = True
    for tool, wrong in TOOLS.items():
        _, log = run(sanitizer, tool, "control", ["megatron_fused_ce.scripts.dev.sanitize_kernels", tool])
        seen = findings(log)
        if not seen[wrong]:
            if (reason := REFUSED.search(log)) and not seen:
                print(f"SKIPPED {tool}: refused here: {reason[0]}")
                continue
            print(f"{tool}: {wrong} was not reported: see {LOGS}")
            return 1
        tests = ["pytest", "-q", "-m", "sanitize", "-p", PLUGIN, "tests/kernels", "tests/op", *words]
        status, log = run(sanitizer, tool, "tests", [*tests, f"--few-cases={tool == 'racecheck'}"])
        falsely = LIKE_RIGHT if seen[RIGHT] else None
        found = {name: n for name, n in findings(log).items() if tool == "memcheck" or name in kernels()}
        problems = [f"{count} findings in {name}" for name, count in found.items() if name != falsely]
        if falsely:
            print(
                f"{tool}: reports the right {RIGHT} too: {findings(log)[falsely]} in {falsely} do not count"
            )
        if reason := BROKEN.search(log):
            problems.append(reason[0])
        launched = set(log.partition(LAUNCHED)[2].partition("\n")[0].split())
        problems += [f"{name} was never launched" for name in sorted(kernels() - launched)]
        # A tool's own status says that it found something.
        problems += [] if re.search(r"^\d+ passed", log, re.MULTILINE) else [f"the tests ended with {status}"]
        problems += re.findall(r"^(?:FAILED|ERROR) .*", log, re.MULTILINE)
        print(f"{tool}: {'; '.join(problems) or 'clean'}", flush=True)
        clean = clean and not problems
    return int(not clean)


# --- in the tests' process ---------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--few-cases", default="False", help="True: each test function's first and last case")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if config.getoption("--few-cases") == "True":
        ends = [{item.nodeid.partition("[")[0]: item for item in order} for order in (items[::-1], items)]
        items[:] = dict.fromkeys(item for of in ends for item in of.values())


def pytest_configure(config: Any) -> None:
    """Note which kernels are launched: their names are said at the end."""
    from triton.runtime import JITFunction

    config.launched, stock = set(), JITFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        config.launched.add(self.fn.__name__)
        return stock(self, *args, **options)

    JITFunction.run = noted


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    terminalreporter.write_line(f"{LAUNCHED} {' '.join(sorted(config.launched))}")


if __name__ == "__main__":
    sys.exit(main())
