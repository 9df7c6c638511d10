"""Copies batches on a separate CUDA stream: the CPU does not wait for the previous optimizer step.

Before forward, torchtitan's `train_step` counts the batch's tokens over all ranks and copies the
batch to the GPU. Both block the CPU until the current stream is done, that is, until the previous
step has ended. So the CPU launches the first kernels of forward when the GPU is already idle.

Here this part runs on another stream. It launches no kernels that training depends on: `zero_grad`,
which is in it, only frees the gradients. Forward, backward and the optimizer run on the stream that
was current. The CPU then prepares forward while the GPU still runs the optimizer of the previous
step. The kernels of training keep their order, and results do not change.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


class Streams:
    """The replacements of two methods of torchtitan's Trainer, and the streams they switch between.

    Attributes:
        main: the stream of forward, backward and the optimizer.
        inputs: the stream of the batches.
        micro_batches: how many of the step's micro-batches have not run yet; 0 between steps.
    """

    def __init__(self) -> None:
        self.main = torch.cuda.current_stream()
        self.inputs = torch.cuda.Stream()
        self.micro_batches = 0

    def train_step(self, original: Callable) -> Callable:
        """Begins the step on the stream for inputs."""

        @functools.wraps(original)
        def train_step(trainer: Any, data_iterator: Any) -> Any:
            if getattr(trainer.forward_backward_step, "__func__", None) is not self.switches_back:
                return original(trainer, data_iterator)  # A subclass has a method of its own.
            self.main = torch.cuda.current_stream()
            self.micro_batches = trainer.gradient_accumulation_steps
            torch.cuda.set_stream(self.inputs)
            try:
                return original(trainer, data_iterator)
            finally:
                self.micro_batches = 0
                torch.cuda.set_stream(self.main)

        return train_step

    def forward_backward_step(self, original: Callable) -> Callable:
        """Runs on the main stream, and leaves it only if another micro-batch follows."""

        @functools.wraps(original)
        def forward_backward_step(trainer: Any, **inputs: Any) -> Tensor:
            if not self.micro_batches:
                return original(trainer, **inputs)  # Not called by train_step.
            torch.cuda.set_stream(self.main)
            self.main.wait_stream(self.inputs)
            for tensor in pytree.tree_leaves(inputs):
                # The next batch must not get its memory while the main stream reads it.
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(self.main)
            loss = original(trainer, **inputs)
            self.micro_batches -= 1
            if self.micro_batches:
                torch.cuda.set_stream(self.inputs)
            return loss

        self.switches_back = forward_backward_step
        return forward_backward_step
