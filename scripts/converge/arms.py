"""What the arms of the paired runs (run.py) need besides titan_fp8: errors, and torchao's experts.

Importing this module registers these model converters with torchtitan.
"""

import copy
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols.model_converter import register_model_converter

import titan_fp8
from titan_fp8.torchtitan_0_2.config import GROUPED_MM

PRODUCT_ERROR = 0.037
"""RMS error of a product of two e4m3 matrices of Gaussian data, relative to its RMS, as
the benchmark of GEMMs measures it (docs/kernels.md)."""


class _Errors(torch.autograd.Function):
    """Adds normal errors to outputs, relative to the RMS of the row, and to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float) -> Tensor:
        ctx.size = size
        rms = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x + size * rms * torch.randn_like(x, dtype=torch.float32)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (g + ctx.size * g * torch.randn_like(g, dtype=torch.float32)).to(g.dtype), None


class _Converter:
    """A model converter of torchtitan."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any):
        self.job_config = job_config

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        pass


class RandomErrors(_Converter):
    """Random errors as large as those of FP8 in the layers' outputs and their gradients.

    The gradients of the input and of the weight get errors of about this size from it. Unlike those
    of FP8 the errors are drawn anew in every step. Of the three products of an expert only the last
    gets errors in forward.
    """

    size = PRODUCT_ERROR

    def convert(self, model: nn.Module) -> None:
        for name in self.fp8_layers(model):
            layer = model.get_submodule(name)
            layer.register_forward_hook(lambda module, args, y: _Errors.apply(y, self.size))

    def fp8_layers(self, model: nn.Module) -> list[str]:
        """The layers that an FP8 arm of this job converts."""
        converted = copy.deepcopy(model)  # on the meta device, so this takes no memory
        section = self.job_config.quantize.linear.titan_fp8
        titan_fp8.convert_linears(converted, filter_fqns=section.filter_fqns)
        if GROUPED_MM in self.job_config.model.converters:
            fqns = self.job_config.quantize.grouped_mm.titan_fp8.fqns
            titan_fp8.convert_experts(converted, fqns=fqns)
        before = dict(model.named_modules())
        return [n for n, m in converted.named_modules() if type(m) is not type(before[n])]


class Control(RandomErrors):
    """Errors four times as large: those of a format with one bit of mantissa, where e4m3 has three.

    They harm training without ending it, so an experiment that finds them is sensitive to harm.
    """

    size = 4 * PRODUCT_ERROR


class TorchaoExperts(_Converter):
    """torchao's FP8 for experts, through the interface of torchao 0.17.

    torchtitan 0.2.2's own converter imports names that only torchao 0.15 has.
    """

    def convert(self, model: nn.Module) -> None:
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization.quant_api import quantize_

        set_token_group_alignment_size_m(16)
        fqns = self.job_config.quantize.grouped_mm.float8.fqns
        quantize_(
            model,
            config=Float8TrainingOpConfig(),
            filter_fn=lambda module, name: (
                isinstance(module, GroupedExperts) and any(fqn in name for fqn in fqns)
            ),
        )


@torch.no_grad()
def move_by_one_ulp(model: nn.Module, seed: int) -> None:
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


register_model_converter(RandomErrors, "converge.errors")
register_model_converter(Control, "converge.control")
register_model_converter(TorchaoExperts, "converge.torchao_experts")
