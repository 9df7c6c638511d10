"""Configs and options of `python -m titan_fp8.plan` that cannot be run."""

from pathlib import Path

import pytest

from titan_fp8.plan import __main__ as plan_main
from titan_fp8.plan import advice, times
from titan_fp8.plan.command import config_run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

PP_4 = ("--parallelism.pipeline_parallel_degree", "4")
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage"
LOOPED = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
TP_ODD = ("--parallelism.tensor_parallel_degree", "8", "--parallelism.expert_parallel_degree", "1")


@pytest.mark.parametrize(
    "config, flags, message",
    [
        ("none", (), "no such file"),
        ("llama3_8b", ("--gpu", "v100"), "--gpu = 'v100'"),
        ("llama3_8b", ("--ngpu", "0"), "--ngpu = 0"),
        ("llama3_8b", ("--ngpu", "7"), "!= WORLD_SIZE(7)"),
        ("llama3_8b", ("--link_gbps", "0"), "--link_gbps = 0.0"),
        ("llama3_8b", ("--out", "x.toml"), "needs --filter auto"),
        ("llama3_8b", ("--parallelism.data_parallel_shard_degree", "-1"), "--ngpu"),
        ("llama3_8b", ("--model.flavor", "9B"), "model.flavor = '9B'"),
        ("llama3_8b", ("--model.name", "none"), "Models of torchtitan are 'deepseek_v3', "),
        ("llama3_8b", ("--model.name", "flux", "--model.flavor", "flux-dev"), "'flux': the plan"),
        ("llama3_8b", ("--experimental.custom_import", "none.py"), "no plan can be made of "),
        ("llama3_8b", ("--training.seq_len", "0"), "training.seq_len = 0: allowed are positive"),
        ("llama3_8b", ("--training.seq_len", "-4"), "training.seq_len = -4: allowed are positive"),
        ("llama3_8b", ("--training.local_batch_size", "0"), "training.local_batch_size = 0"),
        ("llama3_8b", ("--training.global_batch_size", "24"), "size = 24: allowed are multi"),
        ("llama3_8b", ("--parallelism.pipeline_parallel_degree", "64"), "model has 32 blocks"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_microbatch_size", "3"),
         "microbatch_size = 3: allowed are divisors of training.local_batch_size = 2"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_schedule", "none"),
         "pipeline_parallel_schedule = 'none'"),
        ("llama3_8b", (*PP_4, LAYERS, "8"), "layers_per_stage = 8: allowed under pipeline_parallel_"
         "schedule = '1F1B' on 4 ranks are 9 to 11, for 32 blocks that count as 34 layers"),
        ("llama3_8b", (*PP_4, LAYERS, "9", *LOOPED), "layers_per_stage = 9: allowed under pipeline_"
         "parallel_schedule = 'Interleaved1F1B' on 4 ranks are 3, for"),
        ("llama3_8b", (*PP_4, "--parallelism.module_fqns_per_model_part", "layers.0"),
         "parallelism.module_fqns_per_model_part is a list of 1: allowed under pipeline_parallel_"
         "schedule = '1F1B' on 4 ranks are lists of 4"),
        ("llama3_8b", (*PP_4, "--parallelism.pipeline_parallel_last_stage_less_layers", "16"),
         "last_stage_less_layers = 16: allowed are up to 12, what each of 4 stages has at least"),
        ("llama3_8b", (*PP_4, "--model.name", "qwen3", "--model.flavor", "1.7B"),
         "pipeline_parallel_degree = 4: allowed is 1, since torchtitan has no pipeline for"),
        ("llama3_8b", ("--parallelism.tensor_parallel_degree", "16"), "divisors of n_kv_heads = 8"),
        ("deepseek_v3_16b", ("--parallelism.expert_parallel_degree", "3"), "divisors of 64, the"),
        ("deepseek_v3_16b", ("--parallelism.expert_parallel_degree", "16"), "divisors of 8, the"),
        ("deepseek_v3_16b", ("--parallelism.context_parallel_degree", "2"),
         "torchtitan refuses this plan: Context Parallel only"),
        ("llama3_8b", ("--activation_checkpoint.selective_ac_option", "1x"), "'1x': allowed"),
        ("llama3_8b", ("--filter", "auto", "--out", "none/x.toml"), "there is no folder none"),
        ("llama3_8b", ("--training.seq_len", "8190", "--parallelism.tensor_parallel_degree", "4"),
         "torchtitan refuses this plan"),
        ("llama3_8b", ("--quantize.linear.titan_fp8.filter_fqns", "nothing"), "nothing"),
        ("llama3_8b", ("--model.converters", "quantize.linear.titan_fp8,nope"), "lists 'nope': "
         "allowed are "),
        ("deepseek_v3_16b", TP_ODD, "training would stop at"),
    ],
)  # fmt: skip
def test_bad_input(config, flags, message, capsys):
    assert plan_main.main([str(ROOT / "configs" / f"{config}.toml"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_refused_shards_are_named_with_their_sizes():
    run = config_run(str(ROOT / "configs/deepseek_v3_16b.toml"), list(TP_ODD), None)
    h200 = times.load("h200")
    advised = advice.changes(run, h200)
    found = "\n".join(advice.advice(run, advised, h200))
    assert "Training stops at layers.*.feed_forward.w1: N = 1368" in found
    assert "layers.*.feed_forward.w1" in [layer.name for layer in advised.refused]
    assert '"feed_forward.w1"' in advice.fragment(run, advised, h200)
