#!/usr/bin/env bash
# The tests that need a Hopper GPU: kernels against the reference and FP64, and whole layers.
# Arguments go to pytest. The benchmarks are in scripts/bench.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env dev
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || die "no GPU found"
# --noconftest: tests/conftest.py prepares torchtitan for the CPU.
exec "$python" -m pytest --noconftest tests/gpu -q "$@"
