# Sourced by the other scripts. Sets `root`, the repository, and defines `prepare_env`,
# `prepare_torchtitan_0_3` and `count_gpus`. `prepare_env` sets `python` to an interpreter with all
# dependencies:
#
# 1. TITAN_FP8_PYTHON if it is set, unchecked: for container images and GPU nodes without a network.
# 2. Otherwise the python3 on PATH, if it has every package of pyproject.toml in a fitting version,
#    and torchtitan 0.2.
# 3. Otherwise .venv of this repository. The first call creates it with Python 3.10, 3.11 or 3.12,
#    and a change to pyproject.toml or to this file updates it. It gets a version of torch that was
#    tested: 2.11 with an NVIDIA GPU, 2.13 without. pip's settings (PIP_INDEX_URL, ...) say where
#    packages come from; a CPU build of torch is a far smaller download.
#
# `prepare_torchtitan_0_3` sets `python` to an interpreter with torchtitan 0.3: TITAN_FP8_PYTHON if
# that has it, otherwise an environment in build/, which shares packages with the other one.
#
# `count_gpus` prints how many GPUs torch sees, and needs `python`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

has_everything() {
    "$1" - "$root/pyproject.toml" <<'PY' >/dev/null 2>&1
import platform
import sys
from importlib.metadata import version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

try:
    import tomllib
except ImportError:
    import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
assert SpecifierSet(project["requires-python"]).contains(platform.python_version())
needed = sum(project["optional-dependencies"].values(), project["dependencies"])
for package in map(Requirement, needed):
    if package.name != project["name"] and (not package.marker or package.marker.evaluate()):
        assert package.specifier.contains(version(package.name)), package
assert version("torchtitan").startswith("0.2.")
PY
}

# Prints the first Python from 3.10, or from $1, to 3.12 on PATH.
find_python() {
    local oldest=${1:-3.10} candidate
    local in_range="import sys; sys.exit(not (${oldest/./, }) <= sys.version_info < (3, 13))"
    for candidate in python3 python3.12 python3.11 python3.10; do
        "$candidate" -c "$in_range" 2>/dev/null && echo "$candidate" && return
    done
    die "no Python from $oldest to 3.12 on PATH"
}

# Runs a command while no other launch prepares an environment.
locked() {
    local lock
    mkdir -p "$root/build"
    exec {lock}>"$root/build/env.lock"
    flock "$lock"
    "$@"
    exec {lock}>&-
}

has_stamp() { # VENV STAMP
    [[ "$(cat "$1/stamp" 2>/dev/null)" == "$2" ]]
}

install_into() { # VENV WHAT PACKAGE ...
    local venv=$1 what=$2
    shift 2
    "$venv/bin/python" -m pip install --no-compile "$@" >"$venv/install.log" 2>&1 ||
        { tail -n 20 "$venv/install.log" >&2 && die "could not install $what"; }
    # pip compiles on one core, this on all. It fails at files for other versions of Python. A third
    # of the files are tests of packages and models of transformers, which are not imported.
    "$venv/bin/python" -m compileall -q -j 0 -x '/tests/|/transformers/' "$venv" \
        >>"$venv/install.log" 2>&1 || true
}

make_venv() { # VENV STAMP TORCH
    local venv=$1 stamp=$2 torch=$3 host_python
    has_stamp "$venv" "$stamp" && return # Another launch has made it.
    echo "env: installing torch $torch and titan_fp8 into .venv (once; this takes minutes)"
    host_python=$(find_python) || exit 2
    "$host_python" -m venv "$venv" || die "could not create $venv"
    install_into "$venv" "torch, torchtitan and titan_fp8" \
        "torch==$torch" torchtitan==0.2.2 "-e$root[dev]"
    echo "$stamp" >"$venv/stamp"
}

prepare_env() {
    local venv=$root/.venv torch=2.13.0 stamp
    if [[ -n "${TITAN_FP8_PYTHON:-}" ]]; then
        python=$TITAN_FP8_PYTHON
        "$python" -c 'import torch, torchtitan' || die "TITAN_FP8_PYTHON=$python has no torchtitan"
    elif has_everything python3; then
        python=python3
    else
        nvidia-smi -L 2>/dev/null | grep -q GPU && torch=2.11.0
        stamp="$torch $(cat "$root/pyproject.toml" "$root/scripts/env.sh" | cksum)"
        has_stamp "$venv" "$stamp" || locked make_venv "$venv" "$stamp" "$torch"
        python=$venv/bin/python
    fi
}

prepare_torchtitan_0_3() {
    local venv=$root/build/venv-torchtitan-0.3 torch=2.13.0 shared stamp
    local packages=("torch==$torch" torchtitan==0.3.0 triton matplotlib pytest pytest-xdist)
    local is_0_3='from importlib.metadata import version; assert version("torchtitan") >= "0.3"'
    if [[ -n "${TITAN_FP8_PYTHON:-}" ]] && "$TITAN_FP8_PYTHON" -c "$is_0_3" 2>/dev/null; then
        python=$TITAN_FP8_PYTHON
        return
    fi
    prepare_env
    # If that has the same torch, the new environment reads the packages there and adds its own.
    shared=$("$python" - "$torch" <<'PY'
import importlib.metadata
import sys
import sysconfig

same = importlib.metadata.version("torch").split("+")[0] == sys.argv[1]
print(sysconfig.get_path("purelib") if same and sys.version_info >= (3, 11) else "")
PY
    )
    [[ -n "$shared" ]] || python=$(find_python 3.11) || exit 2
    stamp="${packages[*]} $shared"
    has_stamp "$venv" "$stamp" || locked make_venv_0_3 "$venv" "$stamp" "$shared" "${packages[@]}"
    python=$venv/bin/python
}

make_venv_0_3() { # VENV STAMP SHARED PACKAGE ...
    local venv=$1 stamp=$2 shared=$3
    shift 3
    has_stamp "$venv" "$stamp" && return # Another launch has made it.
    echo "env: installing torchtitan 0.3 into build/venv-torchtitan-0.3 (once)"
    "$python" -m venv --clear "$venv" || die "could not create $venv"
    echo "$shared" >"$(echo "$venv"/lib/python*/site-packages)/shared.pth"
    install_into "$venv" "torchtitan 0.3" "$@"
    echo "$stamp" >"$venv/stamp"
}

# Without the driver torch finds no GPU, so its import, which takes 2 s, is left out.
count_gpus() {
    "$python" -c '
try:
    import ctypes
    ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    import torch
    print(torch.cuda.device_count())'
}
