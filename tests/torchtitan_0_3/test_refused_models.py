"""Models that the converters refuse, or whose weights are not gathered in FP8."""

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.experiments.graph_trainer import llama3 as graph_trainer
from torchtitan.models import deepseek_v3

from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter
from titan_fp8.torchtitan_0_3.linear import FP8Linear


@pytest.mark.parametrize("converter", [FP8LinearConverter, FP8GroupedExpertsConverter])
def test_what_lora_has_converted_is_refused(converter):
    """Its parameters are frozen, and would be trained."""
    lora = LoRAConverter.Config(rank=8, target_modules=["wo"])
    model = deepseek_v3.model_registry("debugmodel", converters=[lora]).model
    message = f"{converter.__name__}: recipe = 'rowwise': LoRA has already converted the model"
    with pytest.raises(ValueError, match=message):
        converter.Config(recipe="rowwise").build().convert(model)
    converter.Config(recipe="bf16").build().convert(model)


def test_models_of_graph_trainer_are_not_gathered_in_fp8(caplog):
    """They do not use FSDP2."""
    model = graph_trainer.model_registry("debugmodel").model
    FP8LinearConverter.Config(fsdp_all_gather=True).build().convert(model)
    assert "fsdp_all_gather = True changes nothing" in caplog.text
    linears = [config for _, config, *_ in model.traverse(FP8Linear.Config)]
    assert linears and not any(config.fsdp_all_gather for config in linears)
    with pytest.raises(ValueError, match="FP8LinearConverter: health_freq = 2: it must be 0"):
        FP8LinearConverter.Config(health_freq=2).build().convert(model)
