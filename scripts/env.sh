# Sourced by the other scripts. Sets `root`, the repository, and defines what they share.
#
# `prepare_env [EXTRA]` sets `python` to an interpreter with torchtitan 0.2 and the packages of
# pyproject.toml, with those of one extra: `scripts`, the default, or `dev` for lint and tests.
#
# 1. TITAN_FP8_PYTHON if it is set, unchecked: for container images and GPU nodes without a network.
# 2. Otherwise the python3 on PATH, if it has these packages in fitting versions.
# 3. Otherwise .venv of this repository. The first call creates it with Python 3.10, 3.11 or 3.12,
#    and a change to pyproject.toml or to this file updates it. It gets a version of torch that was
#    tested: 2.11 with an NVIDIA GPU, 2.13 without. pip's settings (PIP_INDEX_URL, ...) say where
#    packages come from; a CPU build of torch is a far smaller download. Into a .venv that these
#    scripts have not created, so without the line $mark in its file `stamp`, nothing is installed.
#
# `prepare_torchtitan_0_3 [test]` sets `python` to an interpreter with torchtitan 0.3, for tests with
# pytest: TITAN_FP8_PYTHON if that has it, otherwise an environment in build/, which shares packages
# with the other one.
#
# `count_gpus` sets `gpus` to the number of NVIDIA GPUs that torch sees, and needs `python`.
#
# `attended COMMAND ...` runs a command or a function, and `start COMMAND ...` does so in the
# background. A signal then ends this script at once, and all that it has started: by itself bash
# would first wait for the command, or end alone. `answer VARIABLE COMMAND ...` does the same
# instead of VARIABLE=$(COMMAND ...).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mark="created by scripts/env.sh of titan_fp8"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

catch_signals() {
    trap 'end_jobs 1' HUP
    trap 'end_jobs 2' INT
    trap 'end_jobs 15' TERM
}

end_jobs() { # SIGNAL
    local job
    trap '' HUP INT TERM
    for job in $(jobs -p); do
        kill -TERM -- "-$job" 2>/dev/null || true # torchrun ends its ranks
    done
    wait
    exit $((128 + $1))
}

start() {
    set -m # in a process group of its own
    { catch_signals; "$@"; } &
    set +m
}

attended() {
    start "$@"
    wait $!
}

answer() { # VARIABLE COMMAND ...
    local file output status=0
    file=$(mktemp)
    exec {output}<>"$file"
    rm "$file"
    attended "${@:2}" >&"$output" || status=$?
    printf -v "$1" %s "$(<"/dev/fd/$output")"
    exec {output}>&-
    return $status
}

catch_signals

# Prints the first package of pyproject.toml with an extra that an interpreter lacks, if any.
lacks() { # PYTHON EXTRA
    "$1" - "$root/pyproject.toml" "$2" 2>/dev/null <<'PY' || echo packaging
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

try:
    import tomllib
except ImportError:
    import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]


def needed(requirements):
    for package in map(Requirement, requirements):
        if package.name == project["name"]:
            for extra in package.extras:
                yield from needed(project["optional-dependencies"][extra])
        elif not package.marker or package.marker.evaluate():
            yield package


def is_there(package):
    try:
        return package.specifier.contains(version(package.name))
    except PackageNotFoundError:
        return False


packages = [*project["dependencies"], f"{project['name']}[{sys.argv[2]}]", "torchtitan<0.3"]
lacking = [package for package in needed(packages) if not is_there(package)]
if not SpecifierSet(project["requires-python"]).contains(platform.python_version()):
    lacking = [f"Python {project['requires-python']}"]
print(*lacking[:1])
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

# Runs a function while no other launch prepares an environment.
locked() {
    local lock
    mkdir -p "$root/build"
    exec {lock}>>"$root/build/env.lock"
    attended flock "$lock"
    "$@"
    exec {lock}>&-
}

# Whether an environment has a line in its stamp: a set of packages that is installed.
has_stamp() { # VENV LINE
    grep -qxF -e "$2" "$1/stamp" 2>/dev/null
}

# Creates an environment, or begins to change one of these scripts.
create_venv() { # VENV PYTHON
    [[ ! -e $1 ]] || has_stamp "$1" "$mark" ||
        die "these scripts have not created $1: move it away"
    mkdir -p "$1"
    echo "$mark" >"$1/stamp"
    attended "$2" -m venv "$1" || die "could not create $1"
}

install_into() { # VENV WHAT PACKAGE ...
    local venv=$1 what=$2
    shift 2
    attended "$venv/bin/python" -m pip install --no-compile "$@" >"$venv/install.log" 2>&1 ||
        { tail -n 20 "$venv/install.log" >&2 && die "could not install $what"; }
    # pip compiles on one core, this on all. It fails at files for other versions of Python. A third
    # of the files are tests of packages and models of transformers, which are not imported.
    attended "$venv/bin/python" -m compileall -q -j 0 -x '/tests/|/transformers/' "$venv" \
        >>"$venv/install.log" 2>&1 || true
}

make_venv() { # VENV STAMP TORCH EXTRA
    local venv=$1 stamp=$2 torch=$3 extra=$4 host_python
    has_stamp "$venv" "$stamp $extra" && return # Another launch has made it.
    echo "env: installing torch $torch and titan_fp8 into .venv (once; this takes minutes)"
    host_python=$(find_python) || exit 2
    create_venv "$venv" "$host_python"
    install_into "$venv" "torch, torchtitan and titan_fp8" \
        "torch==$torch" torchtitan==0.2.2 "-e$root[$extra]"
    printf '%s\n' "$stamp scripts" "$stamp $extra" >>"$venv/stamp" # dev includes scripts
}

prepare_env() { # [EXTRA]
    local extra=${1:-scripts} venv=$root/.venv torch=2.13.0 stamp lacking
    if [[ -n "${TITAN_FP8_PYTHON:-}" ]]; then
        python=$TITAN_FP8_PYTHON
        attended "$python" -c 'import torch, torchtitan' ||
            die "TITAN_FP8_PYTHON=$python has no torchtitan"
        return
    fi
    python=python3
    answer lacking lacks "$python" "$extra"
    [[ -n $lacking ]] || return 0
    python=$venv/bin/python
    if [[ -e $venv ]] && ! has_stamp "$venv" "$mark"; then
        answer lacking lacks "$python" "$extra"
        [[ -z $lacking ]] || die "these scripts have not created $venv, and it lacks $lacking:" \
            "install that, move .venv away, or set TITAN_FP8_PYTHON"
        return 0
    fi
    nvidia-smi -L 2>/dev/null | grep -q GPU && torch=2.11.0
    stamp="$torch $(cat "$root/pyproject.toml" "$root/scripts/env.sh" | cksum)"
    has_stamp "$venv" "$stamp $extra" && return
    echo "env: the python3 on PATH lacks $lacking"
    locked make_venv "$venv" "$stamp" "$torch" "$extra"
}

prepare_torchtitan_0_3() { # [test]
    local venv=$root/build/venv-torchtitan-0.3 torch=2.13.0 shared stamp
    local packages=("torch==$torch" torchtitan==0.3.0 triton matplotlib)
    local is_0_3='from importlib.metadata import version; assert version("torchtitan") >= "0.3"'
    if [[ -n "${TITAN_FP8_PYTHON:-}" ]] &&
        attended "$TITAN_FP8_PYTHON" -c "$is_0_3" 2>/dev/null; then
        python=$TITAN_FP8_PYTHON
        return
    fi
    prepare_env
    # If that has the same torch, the new environment reads the packages there and adds its own.
    answer shared "$python" - "$torch" <<'PY'
import importlib.metadata
import sys
import sysconfig

same = importlib.metadata.version("torch").split("+")[0] == sys.argv[1]
print(sysconfig.get_path("purelib") if same and sys.version_info >= (3, 11) else "")
PY
    [[ -n "$shared" ]] || python=$(find_python 3.11) || exit 2
    stamp="${packages[*]} $shared"
    has_stamp "$venv" "$stamp" || locked make_venv_0_3 "$venv" "$stamp" "$shared" "${packages[@]}"
    [[ -z "${1:-}" ]] || has_stamp "$venv" pytest || locked add_pytest "$venv"
    python=$venv/bin/python
}

make_venv_0_3() { # VENV STAMP SHARED PACKAGE ...
    local venv=$1 stamp=$2 shared=$3
    shift 3
    has_stamp "$venv" "$stamp" && return # Another launch has made it.
    echo "env: installing torchtitan 0.3 into build/venv-torchtitan-0.3 (once)"
    ! has_stamp "$venv" "$mark" || find "$venv" -mindepth 1 ! -path "$venv/stamp" -delete
    create_venv "$venv" "$python"
    echo "$shared" >"$(echo "$venv"/lib/python*/site-packages)/shared.pth"
    install_into "$venv" "torchtitan 0.3" "$@"
    echo "$stamp" >>"$venv/stamp"
}

add_pytest() { # VENV
    has_stamp "$1" pytest && return
    install_into "$1" pytest pytest pytest-xdist
    echo pytest >>"$1/stamp"
}

# Without the driver torch finds no GPU, so its import, which takes 2 s, is left out.
count_gpus() {
    answer gpus "$python" -c '
try:
    import ctypes
    ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    import torch
    print(torch.cuda.device_count())'
}
