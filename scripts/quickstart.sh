#!/usr/bin/env bash
# Train a debug model in bf16 and in blockwise FP8, from the same seed checkpoint and on the same
# data, and compare the losses:
#
#   ./scripts/quickstart.sh [llama3|deepseek_v3] [--steps N]
#
# There are two ranks with FSDP2, on two GPUs or on the CPU, or one rank on a machine with one GPU.
# deepseek_v3 also uses expert parallelism across the ranks. On the CPU, and on GPUs other than
# Hopper, FP8 is emulated.
#
# Results are in outputs/quickstart/MODEL: a folder for each run with its log and TensorBoard
# events, and the comparison as loss.png. The exit status is that of the comparison. With fewer than
# 20 steps a gap of up to 100 % passes. Later calls reuse the environment, the corpus, the tokenizer
# and the seed checkpoint.
#
# Routing amplifies any rounding. So deepseek_v3 trains its baseline a second time, in FP32, and
# accepts an FP8 run whose gap is within the tolerance or within that of the FP32 run.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage="usage: ./scripts/quickstart.sh [llama3|deepseek_v3] [--steps N]"
model=llama3
steps=100
while [[ $# -gt 0 ]]; do
    case $1 in
        llama3 | deepseek_v3) model=$1 ;;
        --steps=*) steps=${1#*=} ;;
        --steps)
            [[ $# -gt 1 ]] || die "--steps needs a number ($usage)"
            steps=$2
            shift
            ;;
        -h | --help)
            echo "$usage"
            exit 0
            ;;
        *) die "unknown argument '$1' ($usage)" ;;
    esac
    shift
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "--steps needs a positive number, not '$steps' ($usage)"

cd "$root"
prepare_env
config=configs/${model}_debug.toml
runs=outputs/quickstart/$model
seed=$runs/seed-$(cksum <"$config" | cut -d ' ' -f 1)
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus == 1 ? 1 : 2))
expert_parallel=$([[ $model == deepseek_v3 ]] && echo "$ranks" || echo 1)
export HF_HUB_OFFLINE=1 LOG_RANK=0

# launch FOLDER [flag ...]: trains, prints one line per step and writes the whole log to FOLDER.
launch() {
    local folder=$1 name
    name=$(basename "$folder")
    shift
    rm -rf "$folder"
    mkdir -p "$folder"
    ./scripts/train.sh "$config" --job.dump_folder "$folder" "$@" 2>&1 | tee "$folder/train.log" |
        sed -u -n -E -e 's/\x1b\[[0-9;]*m//g; s/^.* - (INFO|WARNING) - //' \
            -e "/^(validate )?step: /{s/ +(grad_norm|memory):.*//; s/^/$name  /p}" \
            -e "/emulated/s/^/$name  /p" ||
        { tail -n 40 "$folder/train.log" >&2 && die "this run failed: $folder/train.log"; }
}

# train NAME [flag ...]: trains from the seed checkpoint, in the recipe of the TOML by default.
train() {
    local name=$1
    shift
    echo "== $model, $steps steps: $name"
    NGPU=$ranks launch "$runs/$name" --training.steps "$steps" \
        --parallelism.expert_parallel_degree "$expert_parallel" \
        --checkpoint.enable --checkpoint.load_only \
        --checkpoint.initial_load_path "$seed/checkpoint/step-0" "$@"
}

bf16=(--quantize.linear.titan_fp8.recipe bf16)
fp8=()
capability='import torch; print(torch.cuda.get_device_capability()[0])'
if [[ $gpus -gt 0 && $("$python" -c "$capability") != 9 ]]; then
    fp8=(--quantize.linear.titan_fp8.emulate)
    [[ $model == llama3 ]] || fp8+=(--quantize.grouped_mm.titan_fp8.emulate)
fi
if [[ ! -f $seed/checkpoint/step-0/.metadata ]]; then
    echo "== $model: seed checkpoint"
    NGPU=1 launch "$seed" "${bf16[@]}" --parallelism.expert_parallel_degree 1 \
        --checkpoint.enable --checkpoint.create_seed_checkpoint
fi

rm -f "$runs/loss.png"
compare=("$runs/bf16" "$runs/blockwise" --out "$runs/loss.png")
train bf16 "${bf16[@]}"
train blockwise "${fp8[@]}"
if [[ $model == deepseek_v3 ]]; then
    train fp32 "${bf16[@]}" --training.mixed_precision_param float32
    compare+=(--noise "$runs/fp32")
fi
if [[ $steps -lt 20 ]]; then
    echo "== $steps steps are too few to judge the loss: the bar is 100 %"
    compare+=(--tolerance 100)
fi
echo "== comparison"
"$python" scripts/compare_loss.py "${compare[@]}"
