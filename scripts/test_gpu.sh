#!/usr/bin/env bash
# Everything that needs a Hopper card: the kernels against the reference and FP64, and whole layers on them. Arguments go to
# pytest. Benchmarks are scripts/bench_*.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || die "no GPU found"
# Without tests/conftest.py, which readies torchtitan for the CPU.
exec "$python" -m pytest --noconftest tests/gpu -q "$@"
