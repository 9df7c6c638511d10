#!/usr/bin/env bash
# Train one model in bf16 and in FP8, several times each, and judge whether the losses can be told
# apart; docs/convergence.md says how.
#
#   ./scripts/converge.sh MODEL [--arms ARM,ARM,...] [--steps N] [--minutes M] [--out DIR]
#                         [--no-checkpoints] [-- FLAG ...]
#
# MODEL is a file of configs/convergence. scripts/converge.py describes the options.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
exec "$python" scripts/converge.py "$@"
