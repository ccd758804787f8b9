#!/usr/bin/env bash
# Make .venv ready for `make demo` and `make test`; quick where it is ready already.
#
#   scripts/dev/setup_env.sh                        with python3
#   PYTHON=/path/to/python scripts/dev/setup_env.sh with another one
#
# Without torch in $PYTHON: a venv with everything in requirements/.
# With torch >= 2.6 in $PYTHON (an NGC container, a machine without a network): that torch and every
# package beside it is used as it is; only what is missing is installed, where that can be done.
#
# Afterwards .venv/bin/python runs the project, whichever way it came to be. .venv/missing.txt names
# what could not be installed; it is empty on a complete machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
MCORE_ASIDE=0.19.2 # the newest megatron-core; asks for Python 3.12, its core imports on 3.11 too
MODELOPT_ASIDE=0.47.0 # requirements/modelopt.txt: beside megatron-core, for one file of tests
VENV=.venv

say() { echo "setup: $* (${SECONDS} s)"; }
die() {
    echo "setup: $*" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null || die "found no $PYTHON: install Python 3.10 or newer, or set PYTHON=/path/to/python"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "expected Python 3.10 or newer, found $("$PYTHON" -V 2>&1) as $PYTHON: set PYTHON=/path/to/a/newer/python"

stamp=$("$PYTHON" - requirements/*.txt scripts/dev/setup_env.sh setup.py megatron_fused_ce/__init__.py <<'EOF'
import hashlib, importlib.metadata, os, sys
digest = hashlib.sha256(f"{sys.version} {sys.executable} {os.getcwd()}".encode())
for path in sys.argv[1:]:
    digest.update(open(path, "rb").read())
try:
    digest.update(importlib.metadata.version("torch").encode())
except importlib.metadata.PackageNotFoundError:
    pass
print(digest.hexdigest())
EOF
)
if [ -x $VENV/bin/python ] && [ "$(cat $VENV/stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
rm -f $VENV/stamp

present_torch=$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
if [ -n "$present_torch" ] && ! "$PYTHON" - "$present_torch" <<'EOF'; then
import re, sys
sys.exit(tuple(map(int, re.findall(r"\d+", sys.argv[1])[:2])) < (2, 6))
EOF
    say "torch $present_torch of $PYTHON is older than 2.6 and is not used"
    present_torch=
fi

# Quietly: its words go to pip.log. Modules are compiled when first imported: all of torch's take 40 seconds.
pip_install() {
    $VENV/bin/python -m pip --disable-pip-version-check install --no-compile "$@" >>$VENV/pip.log 2>&1
}

# make_venv true|false: whether it sees $PYTHON's packages. One that fits is kept and brought up to
# date. Without pip where ensurepip is missing.
make_venv() {
    if grep -qsx "include-system-site-packages = $1" $VENV/pyvenv.cfg &&
        [ "$($VENV/bin/python -V 2>&1)" = "$("$PYTHON" -V 2>&1)" ]; then
        return
    fi
    local options=(--clear)
    if [ "$1" = true ]; then options+=(--system-site-packages); fi
    "$PYTHON" -m venv "${options[@]}" $VENV >/dev/null 2>&1 ||
        "$PYTHON" -m venv --without-pip "${options[@]}" $VENV >/dev/null 2>&1
}

if [ -z "$present_torch" ]; then
    say "$("$PYTHON" -V) has no torch: installing everything into $VENV (a few minutes)"
    make_venv false || die "could not make a virtual environment: install Python's venv module (Debian: python3-venv)"
    $VENV/bin/python -m pip --version >/dev/null 2>&1 || die "the virtual environment has no pip: install Python's ensurepip (Debian: python3-venv)"
    : >$VENV/missing.txt
    : >$VENV/pip.log
    for wanted in requirements/torch.txt requirements/dev.txt; do
        say "installing $wanted"
        if ! pip_install -r $wanted; then
            grep -v "^WARNING" $VENV/pip.log | tail -n 5 >&2
            die "could not install $wanted: connect this machine to a package index, or use a Python that has torch already"
        fi
        say "installed $wanted"
    done
else
    say "using torch $present_torch and what else $PYTHON already has"
    if ! make_venv true; then
        say "$PYTHON has no venv module: running the interpreter itself"
        mkdir -p $VENV/bin
        printf '#!/bin/sh\nPYTHONPATH="%s${PYTHONPATH:+:$PYTHONPATH}" exec "%s" "$@"\n' \
            "$PWD" "$(command -v "$PYTHON")" >$VENV/bin/python
        chmod +x $VENV/bin/python
    fi
    : >$VENV/missing.txt
    : >$VENV/pip.log
    # $PYTHON may itself live in a venv, whose packages --system-site-packages does not reach.
    if site=$($VENV/bin/python -c 'import sys, sysconfig; print(sysconfig.get_path("purelib")) if sys.prefix != sys.base_prefix else sys.exit(1)'); then
        "$PYTHON" -c 'import site, sysconfig
print(*dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]), sep="\n")' \
            >"$site/_the_python_below.pth"
    fi
    # Lines of dev.txt whose package is not there, and the versions of all that is: pip must not
    # change those.
    $VENV/bin/python - requirements/dev.txt $VENV/wanted.txt $VENV/keep.txt <<'EOF'
import importlib.metadata, re, sys
wanted, missing, keep = sys.argv[1:]
present = {}
for distribution in importlib.metadata.distributions():
    if distribution.metadata["Name"]:
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        present.setdefault(name, distribution.version)
lines = [line.split(" #")[0].strip() for line in open(wanted) if line[0] not in "#\n"]
absent = [line for line in lines if line.split("==")[0].lower() not in present]
open(missing, "w").writelines(f"{line}\n" for line in absent)
open(keep, "w").writelines(f"{name}=={version}\n" for name, version in present.items())
EOF
    while read -r line; do
        if pip_install --retries 1 --timeout 15 -c $VENV/keep.txt "$line"; then
            say "installed $line"
        else
            say "missing, and could not be installed: $line"
            echo "$line" >>$VENV/missing.txt
        fi
    done <$VENV/wanted.txt
fi

# put_aside FOLDER MODULE PACKAGE PIP-ARGUMENT...: into a folder of its own, which some tests put on their path.
put_aside() {
    local folder=$VENV/$1 module=$2 package=$3
    shift 3
    if [ -d "$folder/$module" ] || pip_install --retries 1 --timeout 15 --no-deps --ignore-requires-python \
        --only-binary=:all: --target "$folder" "$@"; then
        say "installed $package"
        return
    fi
    rm -rf "$folder"
    say "missing, and could not be installed: $package"
    echo "$package" >>$VENV/missing.txt
}
# It has wheels for Python 3.11 and newer.
put_aside "mcore-$MCORE_ASIDE" megatron "megatron-core==$MCORE_ASIDE" "megatron-core==$MCORE_ASIDE"
put_aside "modelopt-$MODELOPT_ASIDE" modelopt "nvidia-modelopt==$MODELOPT_ASIDE" -r requirements/modelopt.txt

# The package itself. --no-build-isolation: torch has brought setuptools, so this needs no network.
if ! pip_install --no-deps --no-build-isolation -e .; then
    site=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [[ $site = "$PWD"/* ]]; then
        echo "$PWD" >"$site/_megatron_fused_ce.pth"
        say "made this folder importable by a .pth file: pip install -e . failed, see $VENV/pip.log"
    fi
fi
$VENV/bin/python -c 'import megatron_fused_ce' || die "the package does not import, see above and $VENV/pip.log"
echo "$stamp" >$VENV/stamp
say "ready: $($VENV/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)')"
