#!/usr/bin/env bash
# Everything that needs a Hopper card: the kernels against the reference and FP64, and whole layers on them. Arguments go to
# pytest. Benchmarks are scripts/bench_*.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || die "no GPU found"
exec "$python" -m pytest tests/gpu -q "$@"
