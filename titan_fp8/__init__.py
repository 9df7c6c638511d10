"""FP8 training for torchtitan: dense and MoE layers, blockwise or rowwise.

The public names are here; README.md shows how to use them. Importing this package imports neither
torchtitan nor triton: the plugin for torchtitan is `titan_fp8.plugin`.
"""

from collections.abc import Sequence

from torch import nn

from titan_fp8.functional import QuantizedWeight, fp8_grouped_mm, fp8_linear, quantize_weight
from titan_fp8.modules.linear import FP8Linear, convert_linears
from titan_fp8.modules.report import ConversionReport
from titan_fp8.modules.revert import revert

__version__ = "0.1.0"

__all__ = [
    "FP8Linear",
    "QuantizedWeight",
    "convert_experts",
    "convert_linears",
    "fp8_grouped_mm",
    "fp8_linear",
    "quantize_weight",
    "revert",
]


def convert_experts(
    model: nn.Module,
    *,
    recipe: str = "blockwise",
    fqns: Sequence[str] = ("experts",),
    emulate: bool = False,
    compile_backend: str | None = None,
) -> ConversionReport:
    """Converts the grouped experts of a torchtitan 0.2 model in place.

    Arguments, result and errors: `titan_fp8.torchtitan_0_2.experts.convert_experts`. Without
    torchtitan 0.2 it raises ImportError.
    """
    try:
        from titan_fp8.torchtitan_0_2.experts import convert_experts as convert
    except ModuleNotFoundError as error:
        raise ImportError("convert_experts needs torchtitan==0.2.2") from error
    return convert(
        model, recipe=recipe, fqns=fqns, emulate=emulate, compile_backend=compile_backend
    )
