#!/usr/bin/env bash
# Train a debug model in bf16 and in blockwise FP8, from the same seed checkpoint and on the same
# data, and compare the losses:
#
#   ./scripts/quickstart.sh [llama3|deepseek_v3] [--steps N] [--torchtitan 0.2|0.3]
#
# There are two ranks with FSDP2, on two GPUs or on the CPU, or one rank on a machine with one GPU.
# deepseek_v3 also uses expert parallelism across the ranks. On the CPU, and on GPUs other than
# Hopper, FP8 is emulated.
#
# torchtitan is 0.2.2 by default. For 0.3 there is another environment, and an override on the
# command line chooses the recipe.
#
# Results are in outputs/quickstart/MODEL, for torchtitan 0.3 in MODEL_torchtitan_0.3: a folder for
# each run with its log and TensorBoard events, and the comparison as loss.png. The exit status is
# that of the comparison. With fewer than 20 steps a gap of up to 100 % passes. Later calls reuse
# the environment, the corpus, the tokenizer and the seed checkpoint, and replace the runs; a second
# call at the same time is refused.
#
# Routing amplifies any rounding. So deepseek_v3, for 20 steps or more, trains its baseline a second
# time, in FP32, and accepts an FP8 run whose gap is within the tolerance or that of the FP32 run.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"

usage="usage: ./scripts/quickstart.sh [llama3|deepseek_v3] [--steps N] [--torchtitan 0.2|0.3]"
model=llama3
steps=100
torchtitan=0.2
while [[ $# -gt 0 ]]; do
    case $1 in
        llama3 | deepseek_v3) model=$1 ;;
        --steps) steps=${2-} && shift ;;
        --torchtitan) torchtitan=${2-} && shift ;;
        -h | --help) echo "$usage" && exit ;;
        *) die "unknown argument '$1' ($usage)" ;;
    esac
    shift || true # An option without its value has shifted already.
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "--steps needs a positive number, not '$steps' ($usage)"
[[ $torchtitan == 0.[23] ]] || die "--torchtitan must be 0.2 or 0.3, not '$torchtitan' ($usage)"

cd "$root"
if [[ $torchtitan == 0.2 ]]; then
    prepare_env
    config=configs/${model}_debug.toml
    runs=outputs/quickstart/$model
    dump_folder=--job.dump_folder
else
    prepare_torchtitan_0_3
    config=configs/torchtitan_0_3.py:${model}_debug
    runs=outputs/quickstart/${model}_torchtitan_0.3
    dump_folder=--dump_folder
fi
export TITAN_FP8_PYTHON=$python # for train.sh
seed=$runs/seed-$(cksum <"${config%:*}" | cut -d ' ' -f 1)
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus == 1 ? 1 : 2))
expert_parallel=$([[ $model == deepseek_v3 ]] && echo "$ranks" || echo 1)
export HF_HUB_OFFLINE=1 LOG_RANK=0 TITAN_FP8_GPUS=$gpus # which train.sh need not count again

# launch FOLDER [flag ...]: trains, prints one line per step and writes the whole log to FOLDER.
launch() {
    local folder=$1
    if [[ -e $folder && ! -f $folder/train.log ]]; then
        rmdir "$folder" 2>/dev/null || die "$folder is not of a quickstart: move it away"
    fi
    rm -rf "$folder"
    mkdir "$folder"
    attended train_and_log "$@" ||
        { tail -n 40 "$folder/train.log" >&2 && die "this run failed: $folder/train.log"; }
}

train_and_log() { # FOLDER [flag ...]
    local folder=$1 name
    name=$(basename "$folder")
    : >"$folder/train.log"
    ./scripts/train.sh "$config" "$dump_folder" "$@" 2>&1 |
        (
            trap '' HUP INT TERM # until the end of what train.sh writes
            tee "$folder/train.log" |
                sed -u -n -E -e 's/\x1b\[[0-9;]*m//g; s/^.* - (INFO|WARNING) - //' \
                    -e "/^(validate )?step: /{s/ +(grad_norm|memory):.*//; s/^/$name  /p}" \
                    -e "/emulated/s/^/$name  /p"
        )
}

# train NAME [flag ...]: trains from the seed checkpoint, in the recipe of the TOML by default.
train() {
    local name=$1
    shift
    echo "== $model, $steps steps: $name"
    NGPU=$ranks launch "$runs/$name" --training.steps "$steps" \
        --parallelism.expert_parallel_degree "$expert_parallel" \
        --checkpoint.enable --checkpoint.load_only \
        --checkpoint.initial_load_path "$root/$seed/checkpoint/step-0" "$@"
}

mkdir -p "$runs"
exec {lock}>>"$runs/lock"
flock -n "$lock" || die "another quickstart is writing to $runs: wait for it, or use another clone"
emulate=
capability='import torch; print(torch.cuda.get_device_capability()[0])'
[[ $gpus -eq 0 || $("$python" -c "$capability") == 9 ]] || emulate=true
if [[ $torchtitan == 0.2 ]]; then
    bf16=(--quantize.linear.titan_fp8.recipe bf16)
    fp8=(${emulate:+--quantize.linear.titan_fp8.emulate})
    [[ $model == llama3 ]] || fp8+=(${emulate:+--quantize.grouped_mm.titan_fp8.emulate})
else
    bf16=(--override.imports titan_fp8.torchtitan_0_3.bf16)
    blockwise=titan_fp8.torchtitan_0_3.blockwise
    [[ -z $emulate ]] || blockwise+='={"emulate": true}'
    fp8=(--override.imports "$blockwise")
fi
if [[ ! -f $seed/checkpoint/step-0/.metadata ]]; then
    echo "== $model: seed checkpoint"
    NGPU=1 launch "$seed" "${bf16[@]}" --parallelism.expert_parallel_degree 1 \
        --checkpoint.enable --checkpoint.create_seed_checkpoint
fi

[[ ! -f $runs/bf16/train.log ]] || rm -f "$runs/loss.png"
compare=("$runs/bf16" "$runs/blockwise" --out "$runs/loss.png")
train bf16 "${bf16[@]}"
train blockwise "${fp8[@]}"
if [[ $steps -lt 20 ]]; then
    echo "== $steps steps are too few to judge the loss: a gap of up to 100 % passes"
    compare+=(--tolerance 100)
elif [[ $model == deepseek_v3 ]]; then
    train fp32 "${bf16[@]}" --training.mixed_precision_param float32
    compare+=(--noise "$runs/fp32")
fi
echo "== comparison"
attended "$python" scripts/compare_loss.py "${compare[@]}"
