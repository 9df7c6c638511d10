#!/usr/bin/env bash
# Train a production model in bf16 and in FP8, one after the other on the GPUs of this machine, and compare speed, memory, loss:
#
#   ./scripts/bench_train.sh llama3_8b|deepseek_v3_16b [--steps N] [RUN ...]
#
# llama3_8b: 1 GPU, batch 1 x 8192, compile, no activation checkpointing, bf16 parameters; the learning rate goes with the
# square root of the batch, for at that of the TOML, whose batch is 32 times as large, gradients of this one burst.
# deepseek_v3_16b: 4 GPUs, EP 4, batch 4 x 4096, op-level checkpointing, compile; routing is left to itself, or balanced by
# force with BALANCED=1. NGPU=8 takes 8 GPUs and EP 8, NGPU=2 takes 2, EP 2 and bf16 parameters, which take no more memory.
# A RUN is RECIPE[/PERMUTATION][:SEED]: which permutation goes around the experts (host, gather; left out, the recipe's own) and
# which seed is used (42). Default runs: bf16 blockwise rowwise. The first is the baseline; the same with another seed tells the
# noise, and the bar for losses is 0.5 % or that noise. Text and tokenizer are the offline ones of prepare_data.py. From 100
# steps on every loss is logged, else every fifth, for logging waits for the GPU; 60 steps are the default.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"

usage="usage: ./scripts/bench_train.sh llama3_8b|deepseek_v3_16b [--steps N] [RUN ...]"
model=${1:-}
steps=60
case $model in
    llama3_8b)
        export NGPU=1
        flags=(--training.local_batch_size 1 --training.seq_len 8192 --training.dtype bfloat16
            --activation_checkpoint.mode none --optimizer.lr 5e-5)
        ;;
    deepseek_v3_16b)
        export NGPU=${NGPU:-4}
        [[ $NGPU =~ ^(2|4|8)$ ]] || die "NGPU must be 2, 4 or 8 for $model, not '$NGPU'"
        flags=(--training.local_batch_size 4 --training.seq_len 4096 --parallelism.expert_parallel_degree "$NGPU"
            --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op)
        [[ $NGPU != 2 ]] || flags+=(--training.dtype bfloat16)
        [[ -z "${BALANCED:-}" ]] || flags+=(--debug.moe_force_load_balance)
        ;;
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    *) die "$usage" ;;
esac
shift
case ${1:-} in
    --steps=*)
        steps=${1#*=}
        shift
        ;;
    --steps)
        steps=${2:-}
        shift 2 || die "$usage"
        ;;
esac
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "--steps needs a positive number, not '$steps'"
[[ $# -gt 0 ]] || set -- bf16 blockwise rowwise
for run in "$@"; do
    [[ $run =~ ^[a-z0-9_]+(/[a-z]+)?(:[0-9]+)?$ ]] || die "'$run' is no RUN, RECIPE[/PERMUTATION][:SEED] ($usage)"
done
prepare_env
"$python" -c "import torch; raise SystemExit(torch.cuda.device_count() < $NGPU)" || die "$model needs $NGPU GPU(s)"

"$python" scripts/prepare_data.py data
folders=()
noise=()
for run in "$@"; do
    folder=outputs/bench_train/$model/${run//[:\/]/-}
    rm -rf "$folder"
    mkdir -p "$folder"
    seed=42
    [[ $run != *:* ]] || seed=${run#*:}
    kind=${run%%:*}
    choice=()
    [[ $kind != */* ]] || choice=(--quantize.grouped_mm.titan_fp8.permutation "${kind#*/}")
    echo "== $model, $steps steps: $run"
    ./scripts/train.sh "configs/$model.toml" "${flags[@]}" --job.dump_folder "$folder" \
        --quantize.linear.titan_fp8.recipe "${kind%%/*}" "${choice[@]}" --debug.seed "$seed" --training.steps "$steps" \
        --lr_scheduler.warmup_steps $((steps / 5)) --parallelism.data_parallel_shard_degree -1 \
        --training.global_batch_size -1 --training.dataset c4_test --training.dataset_path ./data/corpus/train \
        --model.hf_assets_path ./data/tokenizer --compile.enable --metrics.log_freq $((steps < 100 ? 5 : 1)) --metrics.enable_tensorboard \
        --checkpoint.no_enable --validation.no_enable >"$folder/train.log" 2>&1 ||
        { tail -n 40 "$folder/train.log" >&2 && die "run $run failed, see $folder/train.log"; }
    grep -a "step:" "$folder/train.log" | tail -n 1
    if [[ $run != "$1" && $kind == "${1%%:*}" ]]; then
        noise=(--noise "$folder")
    else
        folders+=("$folder")
    fi
done
[[ ${#folders[@]} -lt 2 ]] || "$python" scripts/compare_loss.py "${folders[@]}" "${noise[@]}" --last 50 --tolerance 0.5 \
    --out "outputs/bench_train/$model/loss.png"
