"""An experiment of converge.sh whose train.sh only writes what a job would write.

It logs steps and evaluations, saves empty checkpoints, and resumes from the last one.
"""

from pathlib import Path

TOML = """
[model]
converters = ["quantize.linear.titan_fp8"]
[training]
dataset_path = "text"
local_batch_size = 2
seq_len = 8
steps = 100
[metrics]
enable_tensorboard = true
[parallelism]
data_parallel_shard_degree = 1
[checkpoint]
enable = true
interval = 20
[validation]
dataset_path = "text"
freq = 20
[debug]
seed = 7
"""
# Resumes from its last checkpoint; a checkpoint and an evaluation every 20 steps.
TRAIN = """#!/usr/bin/env bash
shift
while [[ $# -gt 0 ]]; do
    case $1 in
        --job.dump_folder) folder=$2 ;;
        --training.steps) steps=$2 ;;
        --checkpoint.create_seed_checkpoint) seed=1 ;;
        --quantize.linear.titan_fp8.recipe) recipe=$2 ;;
    esac
    shift
done
echo "$(basename "$folder") $CUDA_VISIBLE_DEVICES" >>"$(dirname "$folder")/calls"
echo "deterministic: $TORCHINDUCTOR_DETERMINISTIC"
if [[ -n "$seed" ]]; then
    mkdir -p "$folder/checkpoint/step-0"
    touch "$folder/checkpoint/step-0/.metadata"
    exit 0
fi
[[ $recipe != rowwise ]] || { echo "out of memory"; exit 1; }
first=0
for checkpoint in "$folder"/checkpoint/step-*; do
    [[ ! -d $checkpoint ]] || first=${checkpoint##*-}
done
for ((step = first + 10; step <= steps; step += 10)); do
    echo "step: $step  loss: 3.00000  grad_norm: 1.0  memory: 1.00GiB(1%)  tps: 10  "
    if ((step % 20 == 0)); then
        mkdir -p "$folder/checkpoint/step-$step"
        touch "$folder/checkpoint/step-$step/.metadata"
        echo "{\\"step\\": $step, \\"loss\\": 3.0, \\"accuracy\\": 0.5, \\"experts\\": []}" \\
            >>"$folder/held_out.jsonl"
    fi
    sleep "${PAUSE:-0}"
    [[ $folder != *_resumed || $first != 0 || $step != 70 ]] || sleep 60 # until it is killed
done
"""


def results(root: Path) -> Path:
    return root / "outputs/converge/m"


def calls(root: Path) -> list[str]:
    return [line.strip() for line in (results(root) / "calls").read_text().splitlines()]
