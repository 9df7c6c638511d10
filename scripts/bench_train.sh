#!/usr/bin/env bash
# Train a production model in bf16 and in FP8, one run after the other on the GPUs of this machine,
# and compare speed, memory and loss:
#
#   ./scripts/bench_train.sh llama3_8b|deepseek_v3_16b [--steps N] [RUN ...]
#
# llama3_8b: 1 GPU, batch 1 x 8192, compile, no activation checkpointing, bf16 parameters. The
# learning rate is 5e-5: the batch is a 32nd of the TOML's, and at its 3e-4 the gradients explode.
# deepseek_v3_16b: 4 GPUs, EP 4, batch 4 x 4096, op-level checkpointing, compile. NGPU=8 takes 8
# GPUs and EP 8; NGPU=2 takes 2 GPUs, EP 2 and bf16 parameters, because FP32 ones do not fit there.
# BALANCED=1 forces balanced routing.
#
# A RUN is RECIPE[/PERMUTATION][:SEED]. PERMUTATION is that of the tokens around the experts, host
# (torchtitan's) or gather (titan_fp8's); the default is the recipe's. The default SEED is 42, and
# the default RUNs are bf16, blockwise and rowwise. The first RUN is the baseline. The same RUN with
# another seed measures the noise: a loss may differ from the baseline's by that noise or by 0.5 %,
# whichever is larger.
#
# With 100 steps or more every step is logged, otherwise every fifth, because logging waits for the
# GPU. The default is 60 steps. Text and tokenizer are the offline ones of prepare_data.py. Results
# are in outputs/bench_train/MODEL: a folder for each run, loss.png, and the table as result.json,
# which render_benchmarks.py reads.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"

usage="usage: ./scripts/bench_train.sh llama3_8b|deepseek_v3_16b [--steps N] [RUN ...]"
command="${BALANCED:+BALANCED=$BALANCED }${NGPU:+NGPU=$NGPU }./scripts/bench_train.sh $*"
model=${1:-}
steps=60
routing="free routing"
case $model in
    llama3_8b)
        export NGPU=1
        flags=(--training.local_batch_size 1 --training.seq_len 8192 --training.dtype bfloat16
            --activation_checkpoint.mode none --optimizer.lr 5e-5)
        title="Llama3-8B in torchtitan"
        about="1 GPU, batch 1 x 8192, compile, no activation checkpointing, bf16 parameters."
        ;;
    deepseek_v3_16b)
        export NGPU=${NGPU:-4}
        [[ $NGPU =~ ^(2|4|8)$ ]] || die "NGPU must be 2, 4 or 8 for $model, not '$NGPU'"
        flags=(--training.local_batch_size 4 --training.seq_len 4096
            --parallelism.expert_parallel_degree "$NGPU" --activation_checkpoint.mode selective
            --activation_checkpoint.selective_ac_option op)
        dtype=FP32
        if [[ $NGPU == 2 ]]; then
            dtype=bf16
            flags+=(--training.dtype bfloat16)
        fi
        if [[ -n "${BALANCED:-}" ]]; then
            routing="balanced routing"
            flags+=(--debug.moe_force_load_balance)
        fi
        title="DeepSeekV3-16B in torchtitan, $NGPU GPUs, $routing"
        about="$NGPU GPUs, EP $NGPU, batch 4 x 4096 per GPU, op-level checkpointing, compile,"
        about+=" $dtype parameters, $routing."
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
repeated=()
for run in "$@"; do
    [[ $run =~ ^[a-z0-9_]+(/[a-z]+)?(:[0-9]+)?$ ]] ||
        die "'$run' is no RUN, RECIPE[/PERMUTATION][:SEED] ($usage)"
    [[ $run == "$1" || ${run%%:*} != "${1%%:*}" ]] || repeated+=("$run")
done
[[ ${#repeated[@]} -le 1 ]] || die "only one run may repeat $1 as noise, not ${repeated[*]}"
prepare_env
[[ $(count_gpus) -ge $NGPU ]] || die "$model needs $NGPU GPU(s)"

[[ -f data/stamp ]] || "$python" scripts/prepare_data.py data
flags+=(--training.steps "$steps" --lr_scheduler.warmup_steps $((steps / 5))
    --parallelism.data_parallel_shard_degree -1 --training.global_batch_size -1
    --training.dataset c4_test --training.dataset_path ./data/corpus/train
    --model.hf_assets_path ./data/tokenizer --compile.enable
    --metrics.log_freq $((steps < 100 ? 5 : 1)) --metrics.enable_tensorboard
    --checkpoint.no_enable --validation.no_enable)
results=outputs/bench_train/$model
folders=()
compared=()
noise=()
for run in "$@"; do
    folder=$results/${run//[:\/]/-}
    rm -rf "$folder"
    mkdir -p "$folder"
    seed=42
    [[ $run != *:* ]] || seed=${run#*:}
    kind=${run%%:*}
    choice=()
    [[ $kind != */* ]] || choice=(--quantize.grouped_mm.titan_fp8.permutation "${kind#*/}")
    echo "== $model, $steps steps: $run"
    ./scripts/train.sh "configs/$model.toml" "${flags[@]}" --job.dump_folder "$folder" \
        --quantize.linear.titan_fp8.recipe "${kind%%/*}" "${choice[@]}" --debug.seed "$seed" \
        >"$folder/train.log" 2>&1 ||
        { tail -n 40 "$folder/train.log" >&2 && die "run $run failed, see $folder/train.log"; }
    grep -a "step:" "$folder/train.log" | tail -n 1
    folders+=("$folder")
    if [[ $run != "$1" && $kind == "${1%%:*}" ]]; then
        noise=(--noise "$folder")
    else
        compared+=("$folder")
    fi
done
echo "== results"
BENCH_COMMAND=$command "$python" scripts/tabulate_runs.py "${folders[@]}" \
    --json "$results/result.json" --title "$title" --about "$about"
[[ ${#compared[@]} -lt 2 ]] ||
    "$python" scripts/compare_loss.py "${compared[@]}" "${noise[@]}" --last 50 --tolerance 0.5 \
        --out "$results/loss.png"
