"""`cuda_graph` changes no loss and no norm of gradients of a training, bit for bit.

Steps 1 to 3 warm up, steps 4, 7 and 13 are captured, and 6 and 12 run eagerly, since health_freq
observes them. Evaluations of llama3 come after steps 1, 4, 8 and 12, and leave weights gathered.
Later losses show what gradients did to the weights.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests/helpers")]

from jobs import log_of
from titan_logs import read_run

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

STEPS, TIMEOUT = 14, 300
LINEAR, GROUPED_MM = "--quantize.linear.titan_fp8", "--quantize.grouped_mm.titan_fp8"
COMPILED = ("--compile.enable",)
ACCUMULATED = ("--training.global_batch_size", 8)
EP_2 = ("--parallelism.expert_parallel_degree", 2)
IN_FP8 = (f"{GROUPED_MM}.exchange", "fp8")
BF16 = (f"{LINEAR}.recipe", "bf16", f"{LINEAR}.host_speedups", "True")


def train(folder: Path, model: str, ranks: int, *flags: object) -> tuple[str, dict[str, dict]]:
    """The log of a debug model's training, and its losses and norms by step, in full precision."""
    command = [ROOT / "scripts" / "train.sh", ROOT / "configs" / f"{model}_debug.toml"]
    command += ["--job.dump_folder", folder, *flags]
    command += ["--training.steps", STEPS, "--lr_scheduler.warmup_steps", 2]
    command += ["--activation_checkpoint.mode", "selective"]
    command += ["--activation_checkpoint.selective_ac_option", "op"]
    if model == "llama3":  # torchtitan evaluates no deepseek_v3
        command += ["--validation.enable", "--validation.freq", 4, "--validation.steps", 2]
        command += ["--validation.dataset", "c4_test", "--validation.seq_len", 192]
        command += ["--validation.dataset_path", "./data/corpus/validation"]
    command += ["--debug.deterministic", "--debug.seed", 7, "--metrics.log_freq", 1]
    command += ["--metrics.enable_tensorboard", "--checkpoint.no_enable"]
    # Not every machine with two GPUs has NVLink multicast.
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    log = log_of(command, TIMEOUT, NGPU=str(ranks), LOG_RANK="0", **off)
    series = read_run(folder, "run").series
    names = ["loss", "grad_norm", *["validation loss"] * (model == "llama3")]
    return log, {name: series[name] for name in names}


@pytest.mark.parametrize(
    ("model", "ranks", "flags", "graphs"),
    [
        ("llama3", 1, ACCUMULATED, 6),
        ("llama3", 2, COMPILED, 3),
        ("llama3", 2, BF16, 1),
        ("deepseek_v3", 2, (*COMPILED, *EP_2, *IN_FP8), 3),
        # Compiled blocks round gradients of tokens in high precision once less by all-to-alls.
        ("deepseek_v3", 2, EP_2, 3),
        ("deepseek_v3", 2, (*EP_2, *BF16), 1),
    ],
    ids=["one GPU, accumulation", "FSDP, compiled", "bf16", "EP, FP8", "EP", "EP, bf16"],
)
def test_the_same_training(tmp_path, model, ranks, flags, graphs):
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    if "bf16" not in flags:
        flags += (f"{LINEAR}.health_freq", 6)
    _, expected = train(tmp_path / "eager", model, ranks, *flags)
    log, found = train(tmp_path / "graph", model, ranks, *flags, f"{LINEAR}.cuda_graph")
    assert log.count("are a CUDA graph now") == graphs, log[-5000:]
    assert ("GPUs exchange tokens by writing" in log) == (EP_2[0] in flags)
    assert expected["loss"].keys() == set(range(1, STEPS + 1))
    if model == "llama3":
        assert expected["validation loss"].keys() == {1, 4, 8, 12}
    assert found == expected


def test_a_step_that_waits_for_the_gpu_is_not_captured(tmp_path):
    """Bf16 experts in a loop read the sizes of their groups."""
    flags = (f"{LINEAR}.recipe", "bf16", f"{LINEAR}.host_speedups", "True", f"{LINEAR}.cuda_graph")
    flags += ("--parallelism.expert_parallel_degree", 1, "--experimental.custom_import", "loops")
    (tmp_path / "loops.py").write_text(
        "from torchtitan.models.deepseek_v3 import deepseekv3_args\n"
        "deepseekv3_args['debugmodel'].moe_args.use_grouped_mm = False\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        log, _ = train(tmp_path, "deepseek_v3", 1, *flags)
    assert "cuda_graph: no step is captured" in log and "moe.py:" in log
