#!/usr/bin/env bash
# Lint, types and all tests. Four runs happen side by side, because tests of parallel plans leave
# the cores idle at times:
#
#   all tests but those of the others
#   the tests of tests/kernels that need Triton, with the oldest supported version
#   tests/torchtitan_0_3, in an environment of its own
#   lint.sh
#
# The first prints as it goes, the others when it is done. With a GPU, tests/gpu runs last.
# Arguments go to pytest, and then only lint and the tests happen, all or those named:
#
#   ./scripts/test.sh [tests/units ...] [-k compare ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"
cd "$root"
prepare_env dev
pytest=("$python" -m pytest -q --durations 20)
two=(-n 2 --dist worksteal)
if [[ $# -gt 0 ]]; then
    attended ./scripts/lint.sh
    everything=tests
    for argument; do [[ $argument != tests* ]] || everything=; done
    exec "${pytest[@]}" "${two[@]}" $everything "$@" # unquoted on purpose: no word if it is empty
fi

# torch 2.11 comes with Triton 3.6.0, which may spill registers where a newer Triton does not, and so
# compiles all cases.
with_oldest_triton() {
    local oldest=3.6.0 folder
    [[ "$("$python" -c 'import triton; print(triton.__version__)')" != "$oldest" ]] || return 0
    folder=$root/build/triton-$oldest
    if [[ ! -d $folder ]]; then
        "$python" -m pip install -q --no-deps --target "$logs/triton" "triton==$oldest" ||
            die "could not install triton $oldest"
        mv "$logs/triton" "$folder"
    fi
    PYTHONPATH="$folder:$PYTHONPATH" "${pytest[@]}" tests/kernels
}

with_torchtitan_0_3() {
    prepare_torchtitan_0_3
    # Where torch is another than in the environment for 0.2, that shares no pytest.
    [[ $python != "$root"/* ]] || "$python" -m pip install -q pytest
    "$python" -m pytest -q --durations 20 tests
}

mkdir -p build
logs=$(mktemp -d -p build)
trap 'rm -r "$logs"' EXIT
aside with_oldest_triton
aside with_torchtitan_0_3
aside ./scripts/lint.sh
failed=0
attended "${pytest[@]}" "${two[@]}" tests || failed=1
finish || failed=1

if [[ $failed == 0 ]] && "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
    attended ./scripts/test_gpu.sh || failed=1
fi
exit $failed
