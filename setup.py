"""Packaging. ``kernels/`` and ``scripts/`` live at the top level and are importable as
``megatron_fused_ce.kernels`` and ``megatron_fused_ce.scripts`` through committed links inside the package."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "megatron_fused_ce/__init__.py").read_text(), re.MULTILINE
).group(1)

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
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
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
        # `compare`, `memory`, `sweep` and what they need; the rest of scripts/ is for a clone.
        "megatron_fused_ce.scripts.bench",
        "megatron_fused_ce.scripts.lib",
        "megatron_fused_ce.scripts.runs",
    ],
    package_data={"megatron_fused_ce": ["py.typed", "plan/*.tsv"]},
    install_requires=[
        # Tensors, autograd, the collectives and the matrix products. 2.6 is the oldest that runs in the
        # NGC containers of megatron-core 0.15.
        "torch>=2.6",
        # The row kernels. PyPI's torch for CUDA brings it; a CPU build of torch does not.
        "triton>=3.2; platform_system == 'Linux'",
    ],
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
