# Sourced by the other scripts. Sets `root`, the repository, and defines `die MESSAGE`.
#
# `prepare_env [EXTRA]` sets `python` to an interpreter with torchtitan 0.2 and the packages of
# pyproject.toml, with those of one extra: `scripts`, the default, or `dev` for lint and tests. With
# an empty EXTRA it takes one that has what `pip install .` installs.
#
# 1. TITAN_FP8_PYTHON if it is set, unchecked: for container images and GPU nodes without a network.
# 2. Otherwise the python3 on PATH, if it has these packages in fitting versions.
# 3. Otherwise .venv of this repository. The first call creates it with Python 3.10, 3.11 or 3.12,
#    and a change to pyproject.toml or to this file updates it. It gets a version of torch that was
#    tested: 2.11 with an NVIDIA GPU, 2.13 without. pip's settings (PIP_INDEX_URL, ...) say where
#    packages come from; a CPU build of torch is a far smaller download. Into a .venv that these
#    scripts have not created, so without the line $mark in its file `stamp`, nothing is installed.
#
# `prepare_torchtitan_0_3` sets `python` to an interpreter with torchtitan 0.3: TITAN_FP8_PYTHON if
# that has it, otherwise an environment in build/, which shares packages with the other one.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mark="created by scripts/env.sh of titan_fp8"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# Prints the first package of pyproject.toml and its extra, if one is named, that a Python lacks.
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


def is_there(package):
    try:
        return version(package.name) in package.specifier
    except PackageNotFoundError:
        return False


extras = project["optional-dependencies"]
packages = ["torchtitan<0.3", *project["dependencies"]]
packages += [*extras["scripts"], *extras[sys.argv[2]]] if sys.argv[2] else []
packages = [each for each in map(Requirement, packages) if each.name != project["name"]]
packages = [each for each in packages if not each.marker or each.marker.evaluate()]
lacking = [each for each in packages if not is_there(each)]
if platform.python_version() not in SpecifierSet(project["requires-python"]):
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

# Whether an environment has a line in its stamp: a set of packages that is installed.
has_stamp() { # VENV LINE
    grep -qxF -e "$2" "$1/stamp" 2>/dev/null
}

# Installs packages into an environment of these scripts, which it creates with PYTHON, unless it
# has STAMP. SHARED is a folder of packages to be read there, too, or nothing.
install() { # VENV PYTHON STAMP SHARED PACKAGE ...
    local venv=$1 host=$2 stamp=$3 shared=$4 lock site
    shift 4
    mkdir -p "$root/build"
    exec {lock}>>"$root/build/env.lock"
    flock "$lock" # Another launch may be installing.
    if ! has_stamp "$venv" "$stamp"; then
        [[ ! -e $venv ]] || has_stamp "$venv" "$mark" ||
            die "these scripts have not created $venv: move it away"
        echo "env: installing $* into ${venv#"$root/"} (once; this takes minutes)"
        mkdir -p "$venv"
        echo "$mark" >"$venv/stamp"
        "$host" -m venv "$venv" || die "could not create $venv"
        for site in "$venv"/lib/python*/site-packages; do
            echo "$shared" >"$site/shared.pth"
        done
        "$venv/bin/python" -m pip install --no-compile "$@" >"$venv/install.log" 2>&1 ||
            { tail -n 20 "$venv/install.log" >&2 && die "could not install $*"; }
        # pip would do this on one core. Some packages have files that this Python cannot compile.
        "$venv/bin/python" -m compileall -qq -j 0 -x /tests/ "$venv/lib" || true
        echo "$stamp" >>"$venv/stamp"
    fi
    exec {lock}>&-
}

prepare_env() { # [EXTRA]
    local extra=${1-scripts} venv=$root/.venv torch=2.13.0 stamp lacking host
    python=${TITAN_FP8_PYTHON:-python3}
    if [[ -n "${TITAN_FP8_PYTHON:-}" ]]; then
        "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torchtitan"))' ||
            die "TITAN_FP8_PYTHON=$python has no torchtitan"
        return
    fi
    lacking=$(lacks "$python" "$extra")
    [[ -n $lacking ]] || return 0
    python=$venv/bin/python
    if [[ -e $venv ]] && ! has_stamp "$venv" "$mark"; then
        lacking=$(lacks "$python" "$extra")
        [[ -z $lacking ]] || die "these scripts have not created $venv, and it lacks $lacking:" \
            "install that, move .venv away, or set TITAN_FP8_PYTHON"
        return 0
    fi
    extra=${extra:-scripts}
    [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]] && torch=2.11.0
    stamp="$torch $(cat "$root/pyproject.toml" "$root/scripts/env.sh" | cksum)"
    has_stamp "$venv" "$stamp $extra" || has_stamp "$venv" "$stamp dev" && return
    echo "env: the python3 on PATH lacks $lacking"
    host=$(find_python) || exit 2
    install "$venv" "$host" "$stamp $extra" "" "torch==$torch" torchtitan==0.2.2 "-e$root[$extra]"
}

prepare_torchtitan_0_3() {
    local venv=$root/build/venv-torchtitan-0.3 torch=2.13.0 shared stamp
    local packages=("torch==$torch" torchtitan==0.3.0 triton matplotlib)
    local is_0_3='from importlib.metadata import version; assert version("torchtitan") >= "0.3"'
    python=${TITAN_FP8_PYTHON:-}
    [[ -z $python ]] || ! "$python" -c "$is_0_3" 2>/dev/null || return 0
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
    [[ -n $shared ]] || python=$(find_python 3.11) || exit 2
    stamp="${packages[*]} $shared"
    install "$venv" "$python" "$stamp" "$shared" "${packages[@]}"
    python=$venv/bin/python
}
