#!/usr/bin/env bash
# Lint, types and all tests. tests/kernels, which compiles the kernels for Hopper, runs twice: with
# the installed Triton and with the oldest supported one. tests/torchtitan_0_3 runs in an
# environment of its own. With a GPU, tests/gpu runs too.
# Arguments go to pytest, and then only the first of these test runs happens:
#
#   ./scripts/test.sh [-k compare ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
./scripts/lint.sh
pytest=("$python" -m pytest -q -n 2 --dist worksteal)
"${pytest[@]}" tests "$@"

# torch 2.11 comes with Triton 3.6.0, which may spill registers where a newer Triton does not.
oldest=3.6.0
if [[ $# -eq 0 && "$("$python" -c 'import triton; print(triton.__version__)')" != "$oldest" ]]; then
    folder=$root/build/triton-$oldest
    if [[ ! -d $folder ]]; then
        rm -rf "$folder.part"
        "$python" -m pip install -q --no-deps --target "$folder.part" "triton==$oldest" ||
            die "could not install triton $oldest"
        mv "$folder.part" "$folder"
    fi
    echo "== tests/kernels with Triton $oldest"
    PYTHONPATH="$folder:$PYTHONPATH" "${pytest[@]}" tests/kernels
fi

if [[ $# -eq 0 ]]; then
    (
        prepare_torchtitan_0_3
        echo "== tests/torchtitan_0_3 with torchtitan 0.3"
        "$python" -m pytest -q -n 2 --dist worksteal tests
    )
fi

has_gpu='import torch; raise SystemExit(not torch.cuda.is_available())'
if [[ $# -eq 0 ]] && "$python" -c "$has_gpu"; then
    exec ./scripts/test_gpu.sh
fi
