"""Forward, loss and backward of a step as one CUDA graph, which the CPU launches at once.

A step of a large MoE launches thousands of kernels, and where each is short the GPU waits for the
CPU. Here the first steps run as ever, one more is captured, and later ones replay it.

The first steps compile, load kernels, open connections and fill caches. The last of them also looks
for places where the CPU waits for the GPU. What the CPU reads there could differ from step to step,
so if there is one, no step is captured. This step is of the same form as the one before, since new
forms may compile, too.

All steps run on a stream of their own, because a capture must not touch the default stream, and
autograd and FSDP2 come back to the stream where they began. The optimizer stays on the default one.

The memory of a captured step stays reserved for it. A training step that cannot be replayed,
because health_freq observes it or it is of another form, frees this memory before it runs, and the
next step of its form is captured anew. A form is the shape of a batch, which parameters are
trained, and where parameters and buffers are. Evaluations run beside the graph.
"""

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from titan_fp8.host.gpu_failure import check_all
from titan_fp8.host.torchtitan_0_2.captured_step import Batch, CapturedStep, ModelTensors, Step
from titan_fp8.ops import is_observed
from titan_fp8.patches import log_once

WARM_UP = 3
"""The steps before the first that is captured; more if the last is observed or of a new form."""


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Lists the places of the code where this thread waits for the GPU.

    PyTorch warns of those of all threads, such as one that copies a checkpoint meanwhile. Their
    warnings and all others are shown as ever.
    """
    places: list[str] = []
    text = "called a synchronizing CUDA operation"
    thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if text not in str(message) or threading.get_ident() != thread:
                show(message, category, filename, lineno, *rest)
            elif (place := f"{filename}:{lineno}") not in places:
                places.append(place)

        warnings.showwarning = note  # type: ignore[assignment]
        warnings.filterwarnings("always", text)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def running_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Runs what is inside on `stream`, after what comes before it and before what follows."""
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


def after_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the checkpointer's `dcp_save`.

    With "async_with_pinned_mem" a thread copies the weights, on a stream that waits for no other,
    and after a replay the GPU has most of the step still to run.
    """

    @functools.wraps(original)
    def save(self_: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        return original(self_, *args, **options)

    return save


class StepGraph:
    """Runs the steps of one trainer, each eagerly or as a `CapturedStep`.

    Args:
        key: the setting that asks for it, for messages.
        stream: where they run.
        job_config: the trainer's.
        may_draw: whether a step may draw random numbers. It may not if checkpoints would preserve
            their state without the graph, and draw others when they recompute with it.
    """

    def __init__(self, key: str, stream: torch.cuda.Stream, job_config: Any, may_draw: bool = True):
        self.key, self.stream, self.job_config = key, stream, job_config
        self.may_draw = may_draw
        self.steps = 0
        """How many have begun, without those that have not ended warm-up because they are new."""
        self.can_capture = True
        self.form: list[Any] = []
        """That of the batch that has run last. A form that has not run yet cannot be captured: it
        may compile, load kernels and make an exchange."""
        self.tensors = ModelTensors()
        self.captured: dict[bool, CapturedStep] = {}
        """By whether gradients are added to those of an earlier batch of the step."""

    def forward_backward_step(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps the trainer's."""

        @functools.wraps(original)
        def forward_backward_step(self_: Any, **batch: Any) -> Tensor:
            def step(inputs: dict[str, Any], labels: Tensor, tokens: Any) -> Tensor:
                return original(self_, input_dict=inputs, labels=labels, global_valid_tokens=tokens)

            arguments = batch["input_dict"], batch["labels"], batch["global_valid_tokens"]
            if self_.job_config is not self.job_config:
                return step(*arguments)
            with running_on(self.stream):
                return self.run(step, self_.model_parts[0], *arguments)

        return forward_backward_step

    def close(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps the trainer's. NCCL cannot close a group that a graph uses."""

        @functools.wraps(original)
        def close(self_: Any) -> None:
            if self_.job_config is self.job_config:
                self.captured.clear()
                self.tensors = ModelTensors()  # The patch holds this object.
            original(self_)

        return close

    def run(self, step: Step, model: nn.Module, *arguments: Any) -> Tensor:
        """One batch, with these arguments of a `Step`. Returns the loss."""
        self.tensors.forget_evaluations()
        accumulates = any(p.grad is not None for p in self.tensors.parameters())
        if not accumulates:
            self.steps += 1
            # This batch quantizes weights, in any way and whatever came before, and others of the
            # step do not: ranks that replay and ranks that do not must agree.
            self.tensors.expect_quantized(False)
        before, self.form = self.form, self.tensors.form_of(*arguments)
        is_new = is_observed() or self.form != before
        if is_new and self.steps >= WARM_UP:
            self.start_over()
        if self.steps <= WARM_UP:
            return self.warm_up(step, model, *arguments)
        if not self.can_replay(is_new, accumulates):
            return step(*arguments)
        check_all()  # A replay calls no method of an exchange.
        if accumulates not in self.captured:
            self.captured[accumulates] = self.capture(step, accumulates, Batch(*arguments))
        loss = self.captured[accumulates].replay(*arguments)
        self.tensors.expect_quantized(True)
        return loss

    def start_over(self) -> None:
        """Frees the memory of what has been captured, for a batch that runs without it."""
        log_once(
            logging.INFO,
            f"titan_fp8: {self.key}: steps that health_freq observes run without a CUDA graph, "
            "and so does a batch of another form than the one before, such as another shape",
        )
        if self.steps == WARM_UP:
            self.steps -= 1  # Waits of what such a batch does for the first time count for nothing.
        if self.captured:
            torch.cuda.synchronize()
            self.captured.clear()
            torch.cuda.empty_cache()

    def warm_up(self, step: Step, model: nn.Module, *arguments: Any) -> Tensor:
        """A batch of the first steps. In the last of them nothing may wait."""
        state = torch.cuda.get_rng_state()
        if self.steps == WARM_UP and self.can_capture:
            with waits() as places:
                loss = step(*Batch(*arguments).arguments())
            if places:
                self.can_capture = False
                logger.warning(
                    f"titan_fp8: {self.key}: no step is captured as a CUDA graph, "
                    f"because the CPU waits for the GPU at {', '.join(places)}"
                )
        else:
            loss = step(*arguments)
        if not self.may_draw and not torch.equal(state, torch.cuda.get_rng_state()):
            raise ValueError(
                f"{self.key} = True: activation_checkpoint.preserve_rng_state must be false, "
                "or the model without random numbers, such as those of dropout"
            )
        self.tensors = ModelTensors(model.modules())
        return loss

    def can_replay(self, is_new: bool, accumulates: bool) -> bool:
        """Whether a graph runs a batch after warm-up."""
        if is_new or not self.can_capture:
            return False
        # The second graph adds to the gradients of the first.
        first = self.captured.get(False)
        return not accumulates or (first is not None and first.has_left_gradients())

    def capture(self, step: Step, accumulates: bool, batch: Batch) -> CapturedStep:
        begin = time.perf_counter()
        pool = self.captured[False].pool if accumulates else torch.cuda.graph_pool_handle()
        try:
            captured = CapturedStep(step, batch, self.tensors, self.stream, pool)
        except Exception as error:
            # The capture that an error has ended cannot end, and this second error hides the first.
            reason = error.__context__ or error
            raise RuntimeError(
                f"{self.key} = True: a step cannot be captured as a CUDA graph: "
                f"{type(reason).__name__}: {reason}. Set the key to false"
            ) from error
        another = ", and those that add gradients another one" if accumulates else ""
        logger.info(
            f"titan_fp8: {self.key}: forward, loss and backward are a CUDA graph now{another}; "
            f"capturing has taken {time.perf_counter() - begin:.1f} s"
        )
        return captured
