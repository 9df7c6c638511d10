"""The differentiable functions: products and gated feed-forwards in FP8.

`bodies.py` has what they compute, one body a direction; `product.py` and `swiglu.py` the autograd
functions around it; `weights.py` the kinds of weights; `checks.py` the checks of arguments.
"""

from titan_fp8.functional.product import fp8_grouped_mm, fp8_linear
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.functional.weights import QuantizedWeight, quantize_weight
