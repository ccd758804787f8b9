"""Packaging. ``kernels/`` and ``scripts/`` live at the top level and are importable as
``megatron_fused_ce.kernels`` and ``megatron_fused_ce.scripts`` through committed links inside the package."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
#: Of the repository, such as https://github.com/OWNER/NAME. With one, README's links and pictures are
#: absolute in the metadata, where an index shows them; without, they stay as they are.
ADDRESS = ""
#: Files of the packages below that nothing in a wheel imports: they are for a clone.
LEFT_OUT = {"megatron_fused_ce.scripts.bench": {"commits", "trained"}}
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "megatron_fused_ce/__init__.py").read_text(), re.MULTILINE
).group(1)


class Build(build_py):
    def find_package_modules(self, package, folder):
        modules = super().find_package_modules(package, folder)
        return [module for module in modules if module[1] not in LEFT_OUT.get(package, ())]


def readme():
    text = (HERE / "README.md").read_text()
    if not ADDRESS:
        return text
    of_this_repository = r"(?!#|\w+:)"
    text = re.sub(rf'(!\[[^]]*\]\(|src(?:set)?="){of_this_repository}', rf"\g<1>{ADDRESS}/raw/main/", text)
    return re.sub(rf'(\]\(|href="){of_this_repository}', rf"\g<1>{ADDRESS}/blob/main/", text)


setup(
    name="megatron-fused-ce",
    version=VERSION,
    description="Vocab-parallel fused linear cross-entropy for Megatron-LM: the loss without the logits",
    author="the megatron-fused-ce authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "cross-entropy",
        "fused linear cross-entropy",
        "Megatron-LM",
        "tensor parallelism",
        "sequence parallelism",
        "large language models",
        "Triton",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={"Source": ADDRESS, "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md"} if ADDRESS else {},
    python_requires=">=3.10",
    cmdclass={"build_py": Build},
    entry_points={"console_scripts": ["megatron-fused-ce = megatron_fused_ce.__main__:main"]},
    packages=[
        "megatron_fused_ce",
        "megatron_fused_ce.adapter",
        "megatron_fused_ce.cli",
        "megatron_fused_ce.distillation",
        "megatron_fused_ce.head",
        "megatron_fused_ce.kernels",
        "megatron_fused_ce.logits",
        "megatron_fused_ce.losses",
        "megatron_fused_ce.ops",
        "megatron_fused_ce.plan",
        "megatron_fused_ce.planner",
        "megatron_fused_ce.ranks",
        # `compare`, `memory`, `sweep`, `selfcheck` and what they need; the rest of scripts/ is for a clone.
        "megatron_fused_ce.scripts.bench",
        "megatron_fused_ce.scripts.lib",
        "megatron_fused_ce.scripts.runs",
    ],
    package_data={"megatron_fused_ce": ["py.typed", "adapter/*.tsv", "plan/*.tsv"]},
    # Any torch: a bound would replace a container's own, and so would triton beside pytorch-triton, which has
    # the same module. Where one is too old or missing, the first use says so (cli/versions.py).
    install_requires=["torch"],
    extras_require={
        # Tables of `python -m megatron_fused_ce plan`, which --json does without; and the
        # parser of bash that reads launch scripts (--from-launch FILE), so that this project has none.
        "plan": ["rich>=13", "tree-sitter>=0.25", "tree-sitter-bash>=0.25"],
        # `compare`, `memory` and `sweep`; tensorboard reads its folders for `compare`.
        "tools": ["rich>=13", "matplotlib>=3.8", "tensorboard>=2.12"],
    },
    # megatron-core, apex and transformer-engine are found at run time where they are installed; the
    # op works without them.
)
