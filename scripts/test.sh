#!/usr/bin/env bash
# Lint, format and tests, the compilation of the kernels with two versions of Triton among them.
# Arguments go to pytest, which then runs once: ./scripts/test.sh -k compare
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
"$python" -m ruff check .
"$python" -m ruff format --check .
pytest=("$python" -m pytest -q -n 2 --dist worksteal)
"${pytest[@]}" tests "$@"

# The oldest Triton that we run on, what torch 2.11 brings: it may spill where the newest does not.
oldest=3.6.0
if [[ $# -eq 0 && "$("$python" -c 'import triton; print(triton.__version__)')" != "$oldest" ]]; then
    folder=$root/build/triton-$oldest
    if [[ ! -d $folder ]]; then
        rm -rf "$folder.part"
        "$python" -m pip install -q --no-deps --target "$folder.part" "triton==$oldest" ||
            die "could not install triton $oldest"
        mv "$folder.part" "$folder"
    fi
    echo "== kernels and launches with Triton $oldest"
    PYTHONPATH="$folder:$PYTHONPATH" "${pytest[@]}" tests/kernels
fi

if [[ $# -eq 0 ]] && "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    exec ./scripts/test_gpu.sh
fi
