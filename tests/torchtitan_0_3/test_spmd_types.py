"""torchtitan's default SPMD backend, spmd_types, in which ranks compute on plain local tensors.

Before torch 2.14 FSDP2 does not take its parameters, so here models are sharded and run without
FSDP2. Gloo has no uneven all-to-all but the one that compiled code calls, so with expert
parallelism the experts are compiled.
"""

import pytest
import titan_0_3
import torch
import torch.nn.functional as F
from gloo import spawn
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

TOKENS, LABELS = torch.randint(256, (2, 2, 32), generator=torch.Generator().manual_seed(6))


def run(config: str, ep: int) -> dict[str, Tensor]:
    """The loss and the local gradients on one of two ranks, with tensor parallelism."""
    plan = {"tensor_parallel_degree": 2, "expert_parallel_degree": ep}
    flags = [part for name, value in plan.items() for part in (f"--parallelism.{name}", value)]
    job = titan_0_3.parse(config, *flags, "--training.disable_cuda_graphs")
    dims = ParallelDims.from_config(job.parallelism, 2)
    dist_utils.set_spmd_backend(dims.spmd_backend)
    assert dims.spmd_backend == "spmd_types"
    torch.autograd.set_multithreading_enabled(False)
    job.model_spec.model.update_from_config(config=job)
    model = job.model_spec.model.build()
    model.init_weights()
    titan_0_3.initialize(model)
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        model.parallelize(dims)
        if ep > 1:
            torch._dynamo.config.capture_scalar_outputs = True
            experts = model.layers["1"].moe.routed_experts
            experts.compile(backend="eager", fullgraph=True)
        logits = model(TOKENS)
        # Each rank has the logits of its half of the vocabulary.
        half = logits.shape[-1]
        loss = F.mse_loss(logits, F.one_hot(LABELS, 2 * half)[..., :half].float())
        loss.backward()
    gradients = titan_0_3.gradients(model)
    return {"loss": loss.detach(), **{n.replace("_orig_mod.", ""): g for n, g in gradients.items()}}


def compare(rank: int, model: str, recipe: str, ep: int) -> None:
    """A gradient that lacks a reduction, or has one too many, would be off by half or more.

    The tokens are some that both recipes route to the same experts.
    """
    bf16, fp8 = (run(f"{model}_{name}", ep) for name in ("bf16", recipe))
    assert fp8.keys() == bf16.keys()
    for name, expected in bf16.items():
        error, size = (fp8[name] - expected).norm(), expected.norm()
        assert error <= 0.3 * size, f"{name}: {error / size}"
        # The second half of the vocabulary is not in the data.
        assert error > 0 or name == "loss" or not size, name


@pytest.mark.parametrize(
    "model, recipe, ep",
    [("llama3", "blockwise", 1), ("deepseek_v3", "blockwise", 1), ("deepseek_v3", "blockwise", 2)],
)
def test_gradients_are_those_of_bf16_but_for_rounding(model, recipe, ep):
    spawn(compare, 2, model, recipe, ep)
