"""Configs and options of `python -m titan_fp8.plan` that cannot be run."""

from pathlib import Path

import pytest

from titan_fp8.plan import __main__ as plan_main

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

PP_4 = ("--parallelism.pipeline_parallel_degree", "4")
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage"
LOOPED = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
TP_ODD = ("--parallelism.tensor_parallel_degree", "8", "--parallelism.expert_parallel_degree", "1")


@pytest.mark.parametrize(
    "config, flags, message",
    [
        ("none", (), "none.toml: FileNotFoundError: [Errno 2] No such file"),
        ("llama3_8b", ("--parallelism.data_parallel_shard_degree", "99999"),
         "= 99999 GPUs: allowed are 1 to 16384"),
        ("llama3_8b", ("--train",), "need more GPUs than the 0 there are"),
        ("llama3_8b", ("--train", "--filter", "auto"), "are for plans without --train"),
        ("llama3_8b", ("--recipes", "blockwise"), "--recipes is for --train"),
        ("llama3_8b", ("--train", "--recipes", "bf16"), "'bf16': allowed are 'blockwise'"),
        ("llama3_8b", ("--out", "x.toml"), "--out x.toml: allowed is a new file"),
        ("llama3_8b", ("--parallelism.data_parallel_shard_degree", "-1"),
         "'data_parallel_shard_degree': -1"),
        ("llama3_8b", ("--model.flavor", "9B"), "model.flavor = '9B'"),
        ("llama3_8b", ("--model.name", "none"), "name = 'none': allowed are ['deepseek_v3', "),
        ("llama3_8b", ("--model.name", "flux", "--model.flavor", "flux-dev"), "'flux': allowed"),
        ("llama3_8b", ("--job.custom_config_module", "json"), "module 'json' has no attribute"),
        ("llama3_8b", ("--experimental.custom_import", "none.py"),
         "experimental.custom_import = 'none.py': ModuleNotFoundError"),
        ("llama3_8b", ("--training.seq_len", "0"), "training.seq_len = 0: allowed are positive"),
        ("llama3_8b", ("--training.seq_len", "-4"), "training.seq_len = -4: allowed are positive"),
        ("llama3_8b", ("--training.local_batch_size", "0"), "training.local_batch_size = 0"),
        ("llama3_8b", ("--training.global_batch_size", "24"), "size = 24: allowed are multi"),
        ("llama3_8b", ("--parallelism.pipeline_parallel_degree", "64"),
         "Number of stages (64) cannot be greater than effective layers"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_microbatch_size", "3"),
         "microbatch_size 3"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_schedule", "none"),
         "Unknown schedule name 'none'"),
        ("llama3_8b", (*PP_4, LAYERS, "8"), "pipeline_parallel_layers_per_stage=8"),
        ("llama3_8b", (*PP_4, LAYERS, "9", *LOOPED), "pipeline_parallel_layers_per_stage=9"),
        ("llama3_8b", (*PP_4, "--parallelism.module_fqns_per_model_part", "layers.0"),
         "num_stages 1 must be evenly divisible by pp_degree 4"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_last_stage_less_layers", "16"),
         "output_weight (16) exceeds minimum layers per stage"),
        ("llama3_8b", (*PP_4, "--model.name", "qwen3", "--model.flavor", "1.7B"),
         "pipeline_parallel_degree = 4: allowed are 1, since torchtitan has no pipeline for"),
        ("llama3_8b", ("--parallelism.tensor_parallel_degree", "16"), "divisors of n_kv_heads = 8"),
        ("deepseek_v3_16b", ("--parallelism.expert_parallel_degree", "3"), "of experts = 64"),
        ("deepseek_v3_16b", ("--parallelism.expert_parallel_degree", "16"), "and TP = 8"),
        ("deepseek_v3_16b", ("--parallelism.context_parallel_degree", "2"),
         "Context Parallel only"),
        ("llama3_8b", ("--activation_checkpoint.selective_ac_option", "1x"), "1x"),
        ("llama3_8b", ("--filter", "auto", "--out", "none/x.toml"), "x.toml: allowed is a new"),
        ("llama3_8b", ("--training.seq_len", "8190", "--parallelism.tensor_parallel_degree", "4"),
         "Sequence length 8190 must be divisible"),
        ("llama3_8b", ("--quantize.linear.titan_fp8.filter_fqns", "nothing"), "nothing"),
        ("llama3_8b", ("--model.converters", "quantize.linear.titan_fp8,nope"),
         "there is no 'nope'; allowed are "),
        ("deepseek_v3_16b", TP_ODD, "w1: sizes [1368] on a rank are no multiples of 16"),
    ],
)  # fmt: skip
def test_bad_input(config, flags, message, capsys):
    assert plan_main.main([str(ROOT / "configs" / f"{config}.toml"), *flags]) == 2
    assert message in capsys.readouterr().err
