"""The health of FP8 in a training run: what quantization does to the operands of every layer.

    statistics.py   what is counted, of a sample of elements and of all scales
    sampling.py     takes the samples
    watch.py        wraps the ops so that they report what they have read and written
    observer.py     finds the layer of each operand, and collects the statistics of a step
    report.py       combines ranks, and makes metrics, a table and warnings
    monitor.py      observes the steps of a run that are due, and writes their reports

The adapters for torchtitan call the monitor after each step.
"""

from titan_fp8.health.monitor import Monitor
from titan_fp8.health.observer import Layer, Observer
from titan_fp8.health.report import Report

__all__ = ["Layer", "Monitor", "Observer", "Report"]
