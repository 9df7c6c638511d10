"""`fsdp_all_gather`: FSDP2 gathers the weights in FP8, and training computes the same."""

import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import titan_0_3
import torch
from all_gathers import counting
from gloo import spawn
from torchtitan.models import gpt_oss, qwen3

from titan_fp8.fsdp.sharded_weight import marks
from titan_fp8.health import observer
from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter

EP = ("--parallelism.expert_parallel_degree", 2)
MICRO_BATCHES = ("--training.global_batch_size", 4)
PLANS = {"llama3": ("blockwise_pow2", MICRO_BATCHES), "deepseek_v3": ("blockwise", EP)}
STEPS = 3


def train(rank: int, folder: Path, model: str, recipe: str, flags: list[str]) -> None:
    """Writes the losses and the health of runs without and with FP8 gathers, by an override."""
    override = f"titan_fp8.torchtitan_0_3.{recipe}"
    for name in ("off", "on"):
        fields = {"fsdp_all_gather": name == "on", "health_freq": STEPS}
        entry = f"{override}={json.dumps(fields)}"
        config = titan_0_3.parse(f"{model}_plain", *flags, "--override.imports", entry)
        every_row = mock.patch.object(observer, "SAMPLED_ROWS", 1 << 30)
        with counting() as (gathered, quantized), every_row:
            recorder = titan_0_3.train(config)
        if name == "off":
            assert not gathered and not quantized
        else:
            # In the first step each weight on its own, at each gather; then all together, and once
            # more before the observed step.
            together = [weights for weights in quantized if weights > 1]
            assert len(together) == STEPS and min(together) == max(together) > 9, together
            assert len(gathered) >= together[0]
        if rank == 0:
            found = {"losses": recorder.losses(), "health": recorder.health()[STEPS]}
            (folder / f"{name}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("model", PLANS)
def test_the_losses_are_the_same_to_the_bit(model, text, tmp_path):
    recipe, plan = PLANS[model]
    flags = titan_0_3.flags(text, tmp_path, *plan, "--training.steps", STEPS)
    spawn(train, 2, tmp_path, model, recipe, flags)
    off, on = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("off", "on"))
    assert len(on["losses"]) == STEPS and on["losses"] == off["losses"]
    # With all rows sampled, shards of weights say what whole weights say.
    assert on["health"].keys() == off["health"].keys()
    for tag, value in off["health"].items():
        assert on["health"][tag] == pytest.approx(value, rel=1e-3, abs=1e-9), tag


def test_what_others_read_is_gathered_in_high_precision(caplog):
    caplog.set_level(logging.INFO)
    options = {"recipe": "blockwise", "fsdp_all_gather": True}
    linears = FP8LinearConverter.Config(filter_fqns=["wo"], **options)
    tied = qwen3.model_registry("debugmodel", converters=[linears]).model
    assert tied.enable_weight_tying
    biased = gpt_oss.model_registry(
        "debugmodel", converters=[FP8GroupedExpertsConverter.Config(**options)]
    ).model
    assert "tok_embeddings reads the weight, too" in caplog.text
    assert "FP8GptOssGroupedExperts reads the weights itself" in caplog.text
    with torch.device("meta"):
        sharded, none = (
            {
                f"{fqn}.{name}"
                for fqn, module in model.build().named_modules()
                for name in marks(module)
            }
            for model in (tied, biased)
        )
    assert not none
    assert "lm_head.weight" not in sharded and "layers.0.attention.wo.weight" not in sharded
    assert "layers.0.feed_forward.w1.weight" in sharded
    assert f"gathers the weights of {len(sharded)} modules in FP8" in caplog.text
