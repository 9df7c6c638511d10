"""Forward, loss and backward of a step as one CUDA graph, which the CPU launches at once.

A step of a large MoE launches thousands of kernels, and where each is short the GPU waits for the
CPU. Here the first steps run as ever, one more is captured, and later ones replay it. A replay
launches the same kernels on the same memory, so its results are the same bit for bit. Its inputs
are copied to where the captured step reads them, and gradients appear where it writes them.

The first steps compile, load kernels, open connections and fill caches. The last of them also looks
for places where the CPU waits for the GPU. What the CPU reads there could differ from step to step,
so if there is one, no step is captured. This step is of the same form as the one before, since new
forms may compile, too.

All steps run on a stream of their own, because a capture must not touch the default stream, and
autograd and FSDP2 come back to the stream where they began. FSDP2's streams wait for it, and it
for them, so they belong to the capture, too. The optimizer stays on the default stream.

The memory of a captured step stays reserved for it. A training step that cannot be replayed,
because health_freq observes it or it is of another form, frees this memory before it runs, and the
next step of its form is captured anew. A form is the shape of a batch, which parameters are
trained, and where parameters and buffers are. Evaluations run beside the graph.
"""

import contextlib
import functools
import logging
import operator
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.logging import logger

from titan_fp8.fsdp.sharded_weight import ShardGather, gathers_of
from titan_fp8.host.peer_exchange import check_all
from titan_fp8.ops import is_observed
from titan_fp8.patches import log_once

WARM_UP = 3
"""The steps before the first that is captured; more if the last is observed or of a new form."""

PLAIN = {type(None), bool, int, float, str}
"""Types of values in a batch that are equal if nothing else about the step differs."""

WAIT = "called a synchronizing CUDA operation"
"""How PyTorch's warning begins where the CPU waits for the GPU."""

Step = Callable[[dict[str, Any], Tensor, Any], Tensor]
"""The trainer's step: the loss of (input_dict, labels, global_valid_tokens)."""


class Divisor:
    """A number in GPU memory by which the trainer divides the loss, in place of a Python number.

    PyTorch divides a CUDA tensor by a Python number by multiplying it by the inverse in FP32, in
    forward and in backward. So does this.
    """

    def __init__(self, value: float, device: torch.device):
        self.inverse = torch.empty((), dtype=torch.float32, device=device)
        self.copy_(value)

    def copy_(self, value: float) -> None:
        one, by = torch.tensor([1.0, value], dtype=torch.float32)
        self.inverse.fill_(float(one / by))

    def __rtruediv__(self, loss: Tensor) -> Tensor:
        return loss * self.inverse


class Batch:
    """The arguments of a step, in memory that stays."""

    def __init__(self, inputs: dict[str, Any], labels: Tensor, tokens: Any):
        self.inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.labels = labels.clone()
        # torchtitan counts tokens in a tensor if there is one rank, and otherwise in a number.
        is_tensor = isinstance(tokens, Tensor)
        self.tokens: Any = tokens.clone() if is_tensor else Divisor(tokens, labels.device)

    def arguments(self) -> tuple[dict[str, Any], Tensor, Any]:
        """As `Step` takes them."""
        return {**self.inputs}, self.labels, self.tokens  # A trainer may take what it has read.

    def copy_(self, inputs: dict[str, Any], labels: Tensor, tokens: Any) -> None:
        """Takes the values of a batch of the same form."""
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)
        self.labels.copy_(labels)
        self.tokens.copy_(tokens)


def form_of(
    tensors: list[Tensor | None],
    units: list[FSDPModule],
    inputs: dict[str, Any],
    labels: Tensor,
    tokens: Any,
) -> list[Any]:
    """All that a graph cannot change: what is not the values of tensors.

    `tensors` are the model's parameters and buffers, and `units` those of FSDP2. A batch with other
    values than tensors and PLAIN ones has a form that equals no other, and so has one whose
    gradients FSDP2 keeps to itself, to reduce them with those of a later batch.
    """
    form: list[Any] = [isinstance(tokens, Tensor)]
    for name, v in (*sorted(inputs.items()), ("labels", labels)):
        if isinstance(v, Tensor):
            form.append((name, v.shape, v.dtype, v.device))
        else:
            form.append((name, v if type(v) in PLAIN else object()))
    for t in tensors:
        where = None if t is None else getattr(t, "_local_tensor", t).data_ptr()
        form.append((where, t is not None and t.requires_grad))
    for unit in units:
        if (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
            reduces = group.reduce_grads and group.all_reduce_grads
            form.append(group.gradient_divide_factor if reduces else object())
    return form


class Graph:
    """A CUDA graph of what `run` launches; what `run` allocates comes from `pool`."""

    def __init__(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog may call CUDA meanwhile, from a thread of its own.
        options = {"stream": stream, "pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._graph, **options):
            run()

    def replay(self) -> None:
        self._graph.replay()


class CapturedStep:
    """A step that has been captured, and runs when it is replayed.

    `parameters` are the model's, and `units` those of FSDP2.
    """

    def __init__(
        self,
        step: Step,
        batch: Batch,
        parameters: list[nn.Parameter],
        units: list[FSDPModule],
        stream: torch.cuda.Stream,
        pool: Any,
    ):
        self.batch = batch

        def run() -> None:
            self.loss = step(*batch.arguments()).detach()
            join(stream, units)

        self.graph = Graph(run, stream, pool)
        self.parameters = parameters
        self.gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def has_left_gradients(self) -> bool:
        """Whether the parameters have those of the last replay, and no others."""
        found = [p.grad for p in self.parameters if p.grad is not None]
        own = [gradient for _, gradient in self.gradients]
        return len(found) == len(own) and all(map(operator.is_, found, own))

    def replay(self, *arguments: Any) -> Tensor:
        """Runs the step for the arguments of a `Step`, and returns the loss."""
        self.batch.copy_(*arguments)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.loss.clone()


def forget_evaluations(units: list[FSDPModule]) -> None:
    """Has the next step gather what a captured one gathers, also on a rank that runs it eagerly.

    FSDP2 keeps the order of all forwards since the last backward, which gathers ahead by it. An
    evaluation also leaves some weights gathered. A captured step must gather its own, and none may
    be left that was gathered before a replay, since the optimizer changes it after that.
    """
    for unit in units:
        unit.reshard()
        state = unit._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if (group := state._fsdp_param_group) is not None:
            group._post_forward_indices.clear()


def join(stream: torch.cuda.Stream, units: list[FSDPModule]) -> None:
    """Has `stream` wait for those of FSDP2 that belong to its capture, as a capture must end."""
    # All units have the same ones.
    for other in vars(units[0]._get_fsdp_state()._comm_ctx).values() if units else ():
        if isinstance(other, torch.cuda.Stream):
            with torch.cuda.stream(other):
                belongs = torch.cuda.is_current_stream_capturing()
            if belongs:
                stream.wait_stream(other)


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Lists the places of the code where this thread waits for the GPU.

    PyTorch warns of those of all threads, such as one that copies a checkpoint meanwhile. Their
    warnings and all others are shown as ever.
    """
    places: list[str] = []
    thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if WAIT not in str(message) or threading.get_ident() != thread:
                show(message, category, filename, lineno, *rest)
            elif (place := f"{filename}:{lineno}") not in places:
                places.append(place)

        warnings.showwarning = note  # type: ignore[assignment]
        warnings.filterwarnings("always", WAIT)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Runs what is inside on `stream`, after what comes before it and before what follows."""
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


class StepGraph:
    """Runs the steps of one trainer.

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
        self.can_capture = True
        self.form: list[Any] = []
        """That of the batch that has run last. A form that has not run yet cannot be captured: it
        may compile, load kernels and make an exchange."""
        self.held: list[tuple[dict[str, Any], str]] = []
        """The dictionaries and the names in which modules hold parameters and buffers."""
        self.units: list[FSDPModule] = []
        self.gathers: list[ShardGather] = []
        self.captured: dict[bool, CapturedStep] = {}
        """By whether gradients are added to those of an earlier batch of the step."""
        self.pool: Any = None

    def forward_backward_step(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps the trainer's."""

        @functools.wraps(original)
        def run(self_: Any, **batch: Any) -> Tensor:
            def step(inputs: dict[str, Any], labels: Tensor, tokens: Any) -> Tensor:
                return original(self_, input_dict=inputs, labels=labels, global_valid_tokens=tokens)

            arguments = batch["input_dict"], batch["labels"], batch["global_valid_tokens"]
            if self_.job_config is not self.job_config:
                return step(*arguments)
            with on(self.stream):
                return self.run(step, self_.model_parts[0], *arguments)

        return run

    def close(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps the trainer's. NCCL cannot close a group that a graph uses."""

        @functools.wraps(original)
        def close(self_: Any) -> None:
            if self_.job_config is self.job_config:
                self.captured.clear()
                self.held, self.units, self.gathers = [], [], []  # The patch holds this object.
            original(self_)

        return close

    def save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the checkpointer's.

        With "async_with_pinned_mem" a thread copies the weights, on a stream that waits for no
        other, and after a replay the GPU has most of the step still to run.
        """

        @functools.wraps(original)
        def save(self_: Any, *args: Any, **options: Any) -> Any:
            torch.cuda.current_stream().synchronize()
            return original(self_, *args, **options)

        return save

    def run(self, step: Step, model: nn.Module, *arguments: Any) -> Tensor:
        """One batch, with these arguments of a `Step`. Returns the loss."""
        forget_evaluations(self.units)
        tensors = [held.get(name) for held, name in self.held]
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        adds = any(p.grad is not None for p in parameters)
        self.steps += not adds
        before, self.form = self.form, form_of(tensors, self.units, *arguments)
        # The first batch of a step quantizes weights, in any way and whatever came before, and the
        # others do not: ranks that replay and ranks that do not must agree.
        if not adds:
            self.expect_quantized(False)
        is_new = is_observed() or self.form != before
        if is_new and self.steps >= WARM_UP:
            log_once(
                logging.INFO,
                f"titan_fp8: {self.key}: steps that health_freq observes run without a CUDA graph, "
                "and so does a batch of another form than the one before, such as another shape",
            )
            self.free()
        if is_new and self.steps == WARM_UP:
            self.steps -= 1  # Waits of what such a batch does for the first time count for nothing.
        if self.steps <= WARM_UP:
            state = torch.cuda.get_rng_state()
            loss = self.warm_up(step, *arguments)
            if not self.may_draw and not torch.equal(state, torch.cuda.get_rng_state()):
                raise ValueError(
                    f"{self.key} = True: activation_checkpoint.preserve_rng_state must be false, "
                    "or the model without random numbers, such as those of dropout"
                )
            self.look_at(model)
            return loss
        if is_new:
            return step(*arguments)
        if not self.can_capture:
            return step(*arguments)
        # The second graph adds to the gradients of the first.
        if adds and not (False in self.captured and self.captured[False].has_left_gradients()):
            return step(*arguments)
        check_all()  # A replay calls no method of an exchange.
        if adds not in self.captured:
            self.capture(step, adds, Batch(*arguments), parameters)
        loss = self.captured[adds].replay(*arguments)
        self.expect_quantized(True)
        return loss

    def look_at(self, model: nn.Module) -> None:
        """Finds what a step of the model reads."""
        modules = [*model.modules()]
        holders = [held for m in modules for held in (m._parameters, m._buffers)]
        self.held = [(held, name) for held in holders for name in held]
        self.units = [m for m in modules if isinstance(m, FSDPModule)]
        self.gathers = [gather for m in modules for gather in gathers_of(m).values()]

    def expect_quantized(self, fresh: bool) -> None:
        """Says whether gathers find weights in FP8 that have been quantized since they changed."""
        for gather in self.gathers:
            gather.fresh = fresh and gather.together is not None

    def warm_up(self, step: Step, *arguments: Any) -> Tensor:
        """A batch of the first steps."""
        if self.steps < WARM_UP or not self.can_capture:
            return step(*arguments)
        with waits() as places:
            loss = step(*Batch(*arguments).arguments())
        if places:
            self.can_capture = False
            logger.warning(
                f"titan_fp8: {self.key}: no step is captured as a CUDA graph, "
                f"because the CPU waits for the GPU at {', '.join(places)}"
            )
        return loss

    def capture(self, step: Step, adds: bool, batch: Batch, parameters: list[nn.Parameter]) -> None:
        begin = time.perf_counter()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        where = parameters, self.units, self.stream, self.pool
        try:
            self.captured[adds] = CapturedStep(step, batch, *where)
        except Exception as error:
            # The capture that an error has ended cannot end, and this second error hides the first.
            reason = error.__context__ or error
            raise RuntimeError(
                f"{self.key} = True: a step cannot be captured as a CUDA graph: "
                f"{type(reason).__name__}: {reason}. Set the key to false"
            ) from error
        logger.info(
            f"titan_fp8: {self.key}: forward, loss and backward are a CUDA graph now"
            f"{', and those that add gradients another one' if adds else ''}; capturing has taken "
            f"{time.perf_counter() - begin:.1f} s"
        )

    def free(self) -> None:
        """Frees the memory of what has been captured."""
        if not self.captured:
            return
        torch.cuda.synchronize()
        self.captured.clear()
        self.pool = None
        torch.cuda.empty_cache()
