"""What a job of the convergence experiment loads: `[job] custom_config_module = "converge_plugin"`.

It is titan_fp8.plugin, with additions:

- the flavors "1B" and "tiny" of llama3, "2B" and "tiny" of deepseek_v3, smaller copies of the
  production models;
- held-out evaluation in place of torchtitan's validation, for llama3 and deepseek_v3;
- the model converters "converge.control" and "converge.control_6_bits", which degrade the gradients
  of arms that must fail;
- the model converter "converge.random_errors", which adds errors as large as those of FP8;
- an AdamW that rounds bf16 parameters stochastically (stochastic_adamw.py);
- an option that moves initial weights by one ulp.

torchtitan 0.2.2's own validation reads different text at each evaluation, starts over in a resumed
run, and does not exist for deepseek_v3. Here every evaluation of every arm reads the same tokens.
Each appends a line to held_out.jsonl in the dump folder, with the loss, the next-token accuracy
and, for a MoE, the tokens that each expert of each layer got.

The folder of this file must be on PYTHONPATH; converge.py sets it.
"""

import copy
import dataclasses
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stochastic_adamw import StochasticAdamW
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig as TorchtitanConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools import utils

from titan_fp8 import plugin
from titan_fp8.linear import FP8Linear, convert_linears
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts, convert_experts

HELD_OUT = "held_out.jsonl"
VOCABULARY = 32768

FLAVORS: dict[str, dict[str, Any]] = {
    # 1.0 billion parameters, 8B's head size, ratio of query to key heads and feed-forward ratio.
    "llama3": {
        "tiny": TransformerModelArgs(
            dim=256, n_layers=2, n_heads=4, rope_theta=500000, vocab_size=512
        ),
        "1B": TransformerModelArgs(
            dim=2048,
            n_layers=14,
            n_heads=32,
            n_kv_heads=8,
            ffn_dim_multiplier=1.5,
            multiple_of=1024,
            rope_theta=500000,
            vocab_size=VOCABULARY,
        ),
    },
    # 2.3 billion parameters, with the attention and number of experts of 16B, but smaller.
    "deepseek_v3": {
        "tiny": DeepSeekV3ModelArgs(
            vocab_size=512,
            dim=256,
            inter_dim=512,
            moe_inter_dim=128,
            n_layers=3,
            n_dense_layers=1,
            n_heads=4,
            moe_args=MoEArgs(
                num_experts=8,
                num_shared_experts=1,
                top_k=2,
                score_func="softmax",
                route_norm=False,
                score_before_experts=False,
            ),
            kv_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        "2B": DeepSeekV3ModelArgs(
            vocab_size=VOCABULARY,
            dim=1536,
            inter_dim=6144,
            moe_inter_dim=768,
            n_layers=10,
            n_dense_layers=1,
            n_heads=16,
            moe_args=MoEArgs(
                num_experts=64,
                num_shared_experts=2,
                top_k=4,
                score_func="softmax",
                route_norm=False,
                score_before_experts=False,
            ),
            q_lora_rank=0,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            mscale=0.70,
            attn_type="flex",
            attn_mask_type="block_causal",
        ),
    },
}


@dataclass
class Optimizer:
    """What torchtitan merges into its section [optimizer], for the models in `FLAVORS`.

    Attributes:
        rounding_seed: chooses the random bits that round bf16 parameters, 0 to 127. FP32 parameters
            are not rounded: then it must be 0.
        perturbation_seed: moves every initial weight but zeros by one ulp, up or down at random; 0
            leaves them as they are. Weights that are loaded from a checkpoint are not moved.
    """

    rounding_seed: int = 0
    perturbation_seed: int = 0


@dataclass
class JobConfig(plugin.JobConfig):
    """What torchtitan merges into its own JobConfig."""

    optimizer: Optimizer = field(default_factory=Optimizer)


class HeldOutEvaluation(Validator):
    """Loss, accuracy and expert load on the first `[validation] steps` batches of its text."""

    def __init__(self, job_config: TorchtitanConfig, *args: Any, **kwargs: Any):
        super().__init__(job_config, *args, **kwargs)
        dims, wanted = self.parallel_dims, job_config.validation.steps
        if dims.tp_enabled or dims.pp_enabled or dims.cp_enabled:
            raise ValueError("held-out evaluation runs under FSDP, HSDP and expert parallelism")
        if wanted < 1:
            raise ValueError(f"validation.steps = {wanted}: held-out evaluation needs 1 or more")
        self.validation_dataloader.dataset.infinite = False
        self.batches = [batch for batch, _ in zip(self.validation_dataloader, range(wanted))]
        if (found := len(self.batches)) < wanted:
            raise ValueError(
                f"validation.steps = {wanted}: the held-out text has only {found} batches"
            )
        self.file = Path(job_config.job.dump_folder) / HELD_OUT

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        (model,) = model_parts
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        # Routing counts feed the balancing of experts, which training must find as it left them.
        counted = [layer.tokens_per_expert.clone() for layer in layers]
        for layer in layers:
            layer.tokens_per_expert.zero_()
        model.eval()
        totals = self._sum_over_ranks(sum(self._evaluate(model, *batch) for batch in self.batches))
        model.train()
        routed = [self._sum_over_ranks(layer.tokens_per_expert) for layer in layers]
        for layer, count in zip(layers, counted):
            layer.tokens_per_expert.copy_(count)

        loss_sum, hits, tokens = totals.tolist()
        line = {"step": step, "loss": loss_sum / tokens, "accuracy": hits / tokens}
        line |= {"tokens": int(tokens), "experts": [count.int().tolist() for count in routed]}
        if torch.distributed.get_rank() == 0:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        extra = {"validation_metrics/accuracy": line["accuracy"]}
        self.metrics_processor.log_validation(line["loss"], step, extra)

    def _evaluate(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """(3,) FP64: the sum of losses, the right guesses and the tokens of one batch."""
        tokens, labels = inputs["input"].to(utils.device_type), labels.to(utils.device_type)
        masks = {}
        if getattr(model.model_args, "attn_type", "sdpa") != "sdpa":
            masks["attention_masks"] = model.get_attention_masks(tokens, self.tokenizer)
        with self.validation_context(), self.maybe_enable_amp:
            logits = model(tokens, **masks)
            loss = self.loss_fn(logits, labels)
        counts = (logits.argmax(-1) == labels).sum(), (labels != IGNORE_INDEX).sum()
        return torch.stack([loss.double(), *(count.double() for count in counts)])

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.parallel_dims.dp_cp_enabled:
            torch.distributed.all_reduce(x, group=self.parallel_dims.get_mesh("loss").get_group())
        return x


class Format(NamedTuple):
    """A floating-point format without infinities."""

    mantissa_bits: int
    min_exponent: int
    maximum: float


PRODUCT_ERROR = 0.037
"""RMS error of a product of two e4m3 matrices of Gaussian data, relative to its RMS, as measured by
bench_gemm.py."""

E2M1 = Format(mantissa_bits=1, min_exponent=0, maximum=6.0)
E3M2 = Format(mantissa_bits=2, min_exponent=-2, maximum=28.0)


class _CoarseGradient(torch.autograd.Function):
    """The identity, whose gradient is rounded to a format with one scale for the whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Format) -> Tensor:
        ctx.target = target
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if not g.numel():
            return g, None
        target = ctx.target
        s = g.abs().amax().float().clamp(min=1e-30) / target.maximum
        a = g.abs().float() / s
        # Exponents are in the upper bits of FP32, with a bias of 127.
        exponent = (a.view(torch.int32) >> 23).clamp(min=target.min_exponent + 127)
        step = ((exponent - target.mantissa_bits) << 23).view(torch.float32)
        return ((a / step).round() * step * s * g.sign()).to(g.dtype), None


class _RandomErrors(torch.autograd.Function):
    """Adds normal errors to outputs, relative to the RMS of the row, and to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rms = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x + PRODUCT_ERROR * rms * torch.randn_like(x, dtype=torch.float32)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g + PRODUCT_ERROR * g * torch.randn_like(g, dtype=torch.float32)).to(g.dtype)


def fp8_layers(job_config: TorchtitanConfig, model: nn.Module) -> list[str]:
    """The layers of a bf16 arm that an FP8 arm of the same config converts."""
    converters = job_config.model.converters
    linear = job_config.quantize.linear.titan_fp8
    grouped_mm = job_config.quantize.grouped_mm.titan_fp8
    converted = copy.deepcopy(model)  # on the meta device, so this takes no memory
    if linear.recipe == BF16 and LINEAR in converters:
        convert_linears(converted, filter_fqns=linear.filter_fqns)
    if linear.recipe == BF16 and GROUPED_MM in converters and grouped_mm.recipe is None:
        convert_experts(converted, fqns=grouped_mm.fqns)
    layers = FP8Linear | FP8GroupedExperts
    return [name for name, module in converted.named_modules() if isinstance(module, layers)]


class _OutputConverter:
    """A model converter that applies `change` to the outputs of the layers that FP8 converts."""

    def __init__(self, job_config: TorchtitanConfig, parallel_dims: ParallelDims):
        self.job_config = job_config

    def change(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    def convert(self, model: nn.Module) -> None:
        for name in fp8_layers(self.job_config, model):
            layer = model.get_submodule(name)
            layer.register_forward_hook(lambda module, args, y: self.change(y))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        pass


class Control(_OutputConverter):
    """A control: gradients of the layers' outputs in four bits, with one scale per tensor.

    In e4m3 with one scale per tensor small models keep the loss of bf16, so that would show
    nothing. Four bits without finer scales and stochastic rounding are known to hurt (arXiv
    2501.17116, figure 1; 2505.19115).
    """

    target = E2M1

    def change(self, y: Tensor) -> Tensor:
        return _CoarseGradient.apply(y, self.target)


class ControlOf6Bits(Control):
    """A milder control, for models that learn too little with four bits."""

    target = E3M2


class RandomErrors(_OutputConverter):
    """Random errors as large as those of FP8 in the layers' outputs and their gradients.

    The gradients of the input and of the weight get errors of about this size from it. Unlike those
    of FP8 the errors are drawn anew in every step. They do not reach the inner products of experts
    in forward.
    """

    def change(self, y: Tensor) -> Tensor:
        return _RandomErrors.apply(y)


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Moves every weight but zeros to a neighbor in its dtype, up or down at random.

    The directions depend on the seed, the name of the parameter and the shape of the local shard.
    Replicas therefore move alike, but so do shards of one parameter that have the same shape.
    """
    for name, parameter in model.named_parameters():
        x = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        generator = torch.Generator(x.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        up = torch.randint(2, x.shape, generator=generator, device=x.device, dtype=torch.int8)
        infinity = torch.full((), torch.inf, dtype=x.dtype, device=x.device)
        moved = torch.nextafter(x, torch.where(up.bool(), infinity, -infinity))
        x.copy_(torch.where(x == 0, x, moved))


def _with_options(
    build: Callable[..., OptimizersContainer],
) -> Callable[..., OptimizersContainer]:
    """Wraps torchtitan's `build_optimizers_fn`, and applies the options of `Optimizer`.

    torchtitan calls it right after it has initialized the weights.
    """

    def build_optimizers(
        model_parts: list[nn.Module], optimizer_config: Any, *args: Any, **kwargs: Any
    ) -> OptimizersContainer:
        if optimizer_config.perturbation_seed:
            for part in model_parts:
                perturb(part, optimizer_config.perturbation_seed)
        container = build(model_parts, optimizer_config, *args, **kwargs)
        seed = optimizer_config.rounding_seed
        if not 0 <= seed < 128:
            raise ValueError(f"optimizer.rounding_seed = {seed}: allowed are 0 to 127")
        dtypes = {p.dtype for part in model_parts for p in part.parameters()}
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        if torch.bfloat16 not in dtypes:
            if seed:
                raise ValueError(
                    f"optimizer.rounding_seed = {seed}: parameters of {names} are not rounded; "
                    "only bfloat16 parameters are"
                )
            return container
        if len(dtypes) > 1:
            raise ValueError(f"parameters of {names}: allowed are bfloat16 alone or none of it")
        if optimizer_config.name != "AdamW" or optimizer_config.early_step_in_backward:
            raise ValueError(
                f"optimizer.name = {optimizer_config.name!r}, early_step_in_backward = "
                f"{optimizer_config.early_step_in_backward}: bfloat16 parameters are trained by "
                "'AdamW' after backward"
            )
        container.optimizers[:] = (
            StochasticAdamW(optimizer.param_groups, seed) for optimizer in container.optimizers
        )
        return container

    return build_optimizers


def _register() -> None:
    register_model_converter(Control, "converge.control")
    register_model_converter(ControlOf6Bits, "converge.control_6_bits")
    register_model_converter(RandomErrors, "converge.random_errors")
    for name, flavors in FLAVORS.items():
        spec = get_train_spec(name)
        spec = dataclasses.replace(
            spec,
            model_args={**spec.model_args, **flavors},
            build_validator_fn=HeldOutEvaluation,
            build_optimizers_fn=_with_options(spec.build_optimizers_fn),
        )
        register_train_spec(name, spec)


_register()
