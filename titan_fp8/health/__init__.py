"""The health of FP8 in a training run: what quantization does to the operands of every layer.

    statistics.py   what is counted, of a sample of elements and of all scales
    sampling.py     takes the samples
    watch.py        wraps the ops so that they report what they read and write
    shards.py       samples of weights that FSDP2 gathers in FP8
    observer.py     finds the layer of each operand, and collects the statistics of a step
    report.py       combines ranks, and makes metrics, a table and warnings
    monitor.py      observes the steps of a run that are due
    scalars.py      writes metrics by torchtitan's loggers

The adapters for torchtitan call the monitor after each step.
"""

from titan_fp8.health.monitor import Monitor
from titan_fp8.health.observer import Layer, Observer
from titan_fp8.health.report import Report
from titan_fp8.health.scalars import write_scalars

__all__ = ["Layer", "Monitor", "Observer", "Report", "write_scalars"]
