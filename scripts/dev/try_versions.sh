#!/usr/bin/env bash
# The tests under other versions than CI's, in an environment of their own: what docs/support.md calls "by hand".
#
#   scripts/dev/try_versions.sh FOLDER PYTHON PACKAGE==VERSION ... [-- PYTEST WORDS]
#   scripts/dev/try_versions.sh /tmp/oldest python3.10 torch==2.6.0 triton==3.2.0 megatron-core==0.15.0
#
# FOLDER is kept: a second call with it installs only what changed. It takes several GB where the
# package index has torch with CUDA's libraries only. The package is installed from a wheel and the
# tests run against that, not against this checkout. Exit status: pytest's; 2 on bad input.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

die() {
    echo "try_versions: $*" >&2
    exit 2
}

[ $# -ge 3 ] || die "expected FOLDER PYTHON PACKAGE==VERSION ..., see the head of $0"
folder=$1 python=$2
shift 2
command -v "$python" >/dev/null || die "found no $python"
packages=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do packages+=("$1") && shift; done
[ $# -eq 0 ] || shift
tests=("$@")
# What depends most on the versions of torch, triton and megatron-core.
[ ${#tests[@]} -gt 0 ] || tests=(
    tests/op/test_op.py tests/op/test_promise.py tests/kernels/test_row_kernels.py tests/plan/test_sentences.py
    tests/megatron/test_adapter.py tests/megatron/test_deferred_logits.py tests/parallel/test_models.py
    -k "not compile and not autoload_makes" # the GEMM asks for triton 3.4; the package is not to be taken away
)

[ -x "$folder/env/bin/python" ] || "$python" -m venv "$folder/env" || die "$python could not make $folder/env"
run=$(cd "$folder" && pwd)/env/bin/python
# numpy for the interpreter's kernels and megatron-core, setuptools for torch.utils.cpp_extension.
"$run" -m pip --disable-pip-version-check install -q "${packages[@]}" numpy setuptools pytest hypothesis rich matplotlib tree-sitter tree-sitter-bash ||
    die "could not install ${packages[*]}"
"$run" -m pip --disable-pip-version-check install -q --force-reinstall --no-deps . || die "could not build the wheel"

# The tests of this checkout beside the installed package.
rm -rf "$folder/run" && mkdir "$folder/run"
cp -r tests scripts docs requirements pyproject.toml setup.py README.md "$folder/run"
cd "$folder/run"
"$run" -c 'import platform, importlib.metadata as m, megatron_fused_ce as ours
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in ("torch", "triton", "megatron-core")))
print(ours.__file__)'
# megatron-core 0.15 builds an extension where it is imported, and asks a GPU that may not be there for what.
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} OMP_NUM_THREADS=1 "$run" -m pytest -q -p no:cacheprovider "${tests[@]}"
