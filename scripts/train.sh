#!/usr/bin/env bash
# Launch torchtitan with torchrun, on GPUs or, without any, on the CPU with gloo and emulated FP8:
#
#   ./scripts/train.sh CONFIG [--section.key value ...]
#
# CONFIG is FILE.toml for torchtitan 0.2 or, as FILE.py:FUNCTION, a Python config for 0.3.
# Arguments after it go to torchtitan. Relative paths in them and in CONFIG are relative to the root
# of the repository. The environment has the variables of torchtitan's run_train.sh:
#
#   NGPU         ranks on this machine (default: the number of its GPUs, or 2 without any)
#   LOG_RANK     local ranks that print, comma-separated (default: 0)
#   NNODES       machines (default: 1)
#   MASTER_ADDR  the machine where several meet; its port is MASTER_PORT (default: 29500)
#   NODE_RANK    this machine's number (default: assigned in the order of arrival)
#   RDZV_ID      the job's name if NODE_RANK is not set (default: titan_fp8)

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage="usage: ./scripts/train.sh CONFIG [--section.key value ...]"
[[ $# -ge 1 ]] || die "$usage"
[[ "$1" != -h && "$1" != --help ]] || { echo "$usage"; exit 0; }
file=${1%.py:*}
[[ $file == "$1" ]] || file+=.py
[[ -f "$file" ]] || die "no such config: $1 ($usage)"
[[ $1 != *.py && $1 != *.py: ]] || die "$1 names no function of the file: FILE.py:FUNCTION ($usage)"
folder=$(cd -- "$(dirname -- "$file")" && pwd)
config=$folder/$(basename -- "$file")
arguments=(--job.config_file "$config")
prepare=(prepare_env "")
if [[ $file != "$1" ]]; then
    arguments=("--module=$(basename -- "$file" .py)" "--config=${1##*:}")
    prepare=(prepare_torchtitan_0_3)
    export PYTHONPATH="$PYTHONPATH:$folder"
fi
shift
[[ -z "${NGPU:-}" || $NGPU =~ ^[1-9][0-9]*$ ]] || die "NGPU must be a positive number, not '$NGPU'"
nodes=${NNODES:-1}
[[ $nodes == 1 || -n "${MASTER_ADDR:-}" ]] ||
    die "NNODES=$nodes needs MASTER_ADDR, the machine where all meet"
cd "$root"
"${prepare[@]}"
"$python" -c 'import sys; open(sys.argv[1], encoding="utf-8").read()' "$config" 2>/dev/null ||
    die "$config cannot be read as UTF-8"

gpus=${TITAN_FP8_GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
if [[ $gpus -gt 0 ]]; then
    module=torchtitan.train
    ranks=${NGPU:-$gpus}
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
else
    module=titan_fp8.cpu_host
    ranks=${NGPU:-2}
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
fi

if [[ $nodes == 1 ]]; then
    meeting=(--rdzv_backend c10d --rdzv_endpoint localhost:0)
else
    port=${MASTER_PORT:-29500}
    if [[ -n "${NODE_RANK:-}" ]]; then
        meeting=(--node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$port")
    else
        meeting=(--rdzv_id "${RDZV_ID:-titan_fp8}" --rdzv_backend c10d)
        meeting+=(--rdzv_endpoint "$MASTER_ADDR:$port")
    fi
fi

# The debug configs use the text in data: the offline corpus, unless other text is there.
if grep -q '"\./data/corpus' "$config" && [[ ! -f data/stamp ]]; then
    "$python" scripts/prepare_data.py data
fi

export LOG_RANK=${LOG_RANK:-0}
exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc_per_node "$ranks" \
    "${meeting[@]}" --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m "$module" "${arguments[@]}" "$@"
