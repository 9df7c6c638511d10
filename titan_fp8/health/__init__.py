"""The health of FP8 in a training run: what quantization does to the operands of every layer.

`watch` wraps the ops; `observer` finds the layer of each operand, of which `sampling` takes samples
for `statistics`; `report` combines ranks. The adapters call the `monitor` after each step.
"""

from titan_fp8.health.monitor import Monitor
from titan_fp8.health.observer import Layer, Observer
from titan_fp8.health.report import Report
