"""What each rank runs in the tests of parallel plans.

A rank builds, converts and parallelizes the model as torchtitan does from a configuration, then
runs one forward and backward on its share of the batch.

The models are torchtitan's debug flavors with two layers and with dimensions whose halves are
multiples of 16 but not of 128, so that the blocks of a shard are not blocks of the whole tensor.
The routing is fixed, since a token near a tie may go to another expert after any rounding error. It
is uneven and leaves two experts without tokens.
"""

import contextlib
import copy
import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from plan_oracle import as_on_ranks
from plans import PLANS, RECIPES, Plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8 import cpu_host

cpu_host.prepare()

from parsing import parse_args
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import maybe_enable_amp
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

SEQ_LEN, VOCAB = 160, 2048
FLAVOR = "two_layers"
SHAPES = {
    "llama3": {"n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 32},
    "deepseek_v3": {
        "n_layers": 2,
        "dim": 208,
        "n_heads": 4,
        "inter_dim": 352,
        "moe_inter_dim": 224,
        "kv_lora_rank": 144,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
    },
}
CHOICES = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 1, 4], [0, 4, 5]])
"""The experts of five consecutive tokens; the pattern repeats and starts anew in every sequence."""


class Result(NamedTuple):
    """The logits of this rank's sequences, None before the last pipeline stage, and gradients."""

    output: Tensor | None
    grads: dict[str, Tensor]


def run_unsharded(rank: int, folder: Path) -> None:
    """Writes the seed checkpoint and the results of an unsharded model, one model on each rank."""
    plan = Plan(list(SHAPES)[rank])
    torch.manual_seed(0)
    model = build(plan, configure(plan, "bf16"))
    materialize(model)
    dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=folder / plan.model, no_dist=True)
    cases = {(has_whole_router_gradient(p), p.sequences) for p in PLANS if p.model == plan.model}
    for learned_scores, sequences in cases:
        fix_routing(learned_scores)
        text = batch(sequences)
        results = {recipe: run(plan, recipe, folder, text) for recipe in ("bf16", *RECIPES)}
        torch.save(results, folder / f"{plan.model}-{learned_scores}-{sequences}.pt")


def run_plan(rank: int, plan: Plan, folder: Path) -> None:
    """Writes the results of this rank of `plan`; the first two also write those of the oracle."""
    fix_routing(has_whole_router_gradient(plan))
    text = batch(plan.sequences)
    results = {recipe: run(plan, recipe, folder, text) for recipe in RECIPES}
    torch.save(results, folder / f"{plan.name}-{rank}.pt")
    if rank < len(RECIPES):
        torch.save(
            run_oracle(plan, RECIPES[rank], folder), folder / f"{plan.name}-{RECIPES[rank]}.pt"
        )


def has_whole_router_gradient(plan: Plan) -> bool:
    """Whether torchtitan computes the whole gradient of the router.

    Under tensor parallelism each rank keeps only the part from its own slice of the experts. The
    router's gradient is off by 0.7 of its norm then, with FP8 or without, so these tests detach the
    scores.
    """
    return plan.tp == 1


def fix_routing(learned_scores: bool) -> None:
    """Replaces the round-robin of torchtitan's forced load balance by CHOICES."""

    def route(self: TokenChoiceTopKRouter, scores: Tensor) -> tuple[Tensor, Tensor]:
        experts = CHOICES.repeat(scores.shape[0] // len(CHOICES), 1)
        chosen = scores.gather(1, experts)
        return experts, chosen if learned_scores else chosen.detach()

    TokenChoiceTopKRouter._debug_force_load_balance_routing = route


def configure(plan: Plan, recipe: str, precision: str = "float32") -> JobConfig:
    flavors = get_train_spec(plan.model).model_args
    flavors[FLAVOR] = dataclasses.replace(flavors["debugmodel"], **SHAPES[plan.model])
    config = copy.deepcopy(parse_once(plan.model))
    for name, degree in plan.degrees.items():
        setattr(config.parallelism, name, degree)
    config.training.mixed_precision_param = precision
    config.training.local_batch_size = plan.sequences // plan.shares
    config.quantize.linear.titan_fp8.recipe = recipe
    return config


@functools.cache
def parse_once(model: str) -> JobConfig:
    """Parsing takes as long as a forward and backward, so the server of ranks does it."""
    flags = [*Plan(model).flags(RECIPES[0]), "--model.flavor", FLAVOR]
    flags += ["--training.seq_len", str(SEQ_LEN), "--activation_checkpoint.mode", "none"]
    # Loss parallel sums the softmax in another order, which can change how a value is rounded.
    flags += ["--debug.moe_force_load_balance", "--parallelism.disable_loss_parallel"]
    return parse_args(flags)


def dims_of(plan: Plan) -> ParallelDims:
    degrees = dataclasses.asdict(plan)
    del degrees["model"]
    replicate, fsdp = degrees.pop("replicate"), degrees.pop("fsdp")
    return ParallelDims(
        dp_replicate=replicate, dp_shard=fsdp, cp=1, world_size=plan.ranks, **degrees
    )


def build(plan: Plan, config: JobConfig) -> nn.Module:
    """The converted model on the meta device."""
    spec = get_train_spec(plan.model)
    args = spec.model_args[FLAVOR]
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    build_model_converters(config, dims_of(plan)).convert(model)
    return model


def materialize(*parts: nn.Module) -> None:
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights()


def load(parts: list[nn.Module], checkpoint: Path, alone: bool) -> None:
    # Random numbers would take a quarter of the time of a plan. A weight that is not loaded is NaN.
    def nan(weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        (weight.to_local() if isinstance(weight, DTensor) else weight).fill_(torch.nan)
        return weight

    places = [f"torchtitan.models.{name}" for name in ("llama3.model.model", "moe.moe")]
    places += ["torchtitan.models.deepseek_v3.model.model", "torch.nn.init"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.nn.init.normal_", nan))
        for place in places:
            stack.enter_context(mock.patch(f"{place}.trunc_normal_", nan))
        materialize(*parts)
    wrapper = ModelWrapper(parts)
    state = wrapper.state_dict()
    dcp.load(state, checkpoint_id=checkpoint, no_dist=alone)
    wrapper.load_state_dict(state)


def batch(sequences: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels (sequences, SEQ_LEN)."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (sequences, SEQ_LEN + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def run(
    plan: Plan,
    recipe: str,
    folder: Path,
    text: tuple[Tensor, Tensor],
    precision: str = "float32",
) -> Result:
    """One forward and backward of `plan` on this rank's share of tokens and labels."""
    config, dims = configure(plan, recipe, precision), dims_of(plan)
    spec, model = get_train_spec(plan.model), build(plan, config)
    tokens, labels = text
    total = labels.numel()
    if plan.shares > 1:
        share = dims.get_mesh("batch").get_local_rank()
        tokens, labels = (t.chunk(plan.shares)[share] for t in (tokens, labels))
    if plan.pp > 1:
        schedule, parts, first, last = spec.pipelining_fn(
            model, dims, config, torch.device("cpu"), model.model_args, spec.parallelize_fn,
            cross_entropy_loss,
        )  # fmt: skip
    else:
        parts = [spec.parallelize_fn(model, dims, config)]
    load(parts, folder / plan.model, alone=plan.ranks == 1)
    # Like torchtitan's trainer, which divides the loss by the tokens, but not in a pipeline.
    if plan.pp > 1:
        target = {"target": labels, "losses": []} if last else {}
        output = schedule.step(*([tokens] if first else []), **target)
    else:
        with maybe_enable_amp(dims, precision, "cpu"):
            output = parts[0](tokens)
            loss = cross_entropy_loss(output, labels) / total
        loss.backward()
    named = (item for part in parts for item in part.named_parameters())
    # DDP averages gradients; torchtitan makes FSDP sum them.
    averaged = 1 if plan.fsdp > 1 else 1 / plan.replicate
    return result(output, named, total if plan.pp > 1 else averaged)


def run_oracle(plan: Plan, recipe: str, folder: Path) -> Result:
    """The results of the oracle on the whole batch."""
    alone = Plan(plan.model)
    model = build(alone, configure(alone, "bf16"))
    load([model], folder / plan.model, alone=True)
    named = list(model.named_parameters())
    microbatches = plan.sequences if plan.pp > 1 else 1
    as_on_ranks(model, plan, microbatches, recipe)
    tokens, labels = batch(plan.sequences)
    output = model(tokens)
    scale = labels.numel() if plan.pp > 1 else 1
    (cross_entropy_loss(output, labels) / (labels.numel() // scale)).backward()
    return result(output, named, scale)


def result(output: Tensor | None, named, scale: float) -> Result:
    def whole(t: Tensor) -> Tensor:
        return (t.full_tensor() if isinstance(t, DTensor) else t).detach().float()

    grads = {name: whole(p.grad) / scale for name, p in named if p.grad is not None}
    return Result(None if output is None else whole(output), grads)
