#!/usr/bin/env bash
# Train production models under many parallel plans in bf16 and in FP8, and print one table:
#
#   NGPU=1|2|4 ./scripts/bench_plans.sh [--list] [--steps N] [--recipes bf16,blockwise] [PLAN ...]
#
# bench_plans.py says what the columns are.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"
prepare_env
if [[ " $* " != *" --list "* && " $* " != *" --help "* && " $* " != *" -h "* ]]; then
    export NGPU=${NGPU:-4}
    count_gpus
    [[ $NGPU =~ ^[0-9]+$ && $gpus -ge $NGPU ]] ||
        die "NGPU=$NGPU: this machine has fewer GPUs"
    [[ -f data/stamp ]] || attended "$python" scripts/prepare_data.py data
fi
export BENCH_COMMAND="NGPU=${NGPU:-4} ./scripts/bench_plans.sh $*"
exec "$python" scripts/bench_plans.py "$@"
