"""One step, captured as a CUDA graph.

A replay launches the same kernels on the same memory, so its results are the same bit for bit. Its
inputs are copied to where the captured step reads them, and gradients appear where it writes them.
FSDP2's streams wait for the one that is captured, and it for them, so they belong to the capture.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_fp8.fsdp.sharded_weight import gathers_of

PLAIN = {type(None), bool, int, float, str}
"""Types of values in a batch that are equal if nothing else about the step differs."""

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


class ModelTensors:
    """What a step of a model reads: parameters and buffers, and how FSDP2 gathers them."""

    def __init__(self, modules: Iterable[nn.Module] = ()):
        modules = [*modules]
        holders = [holder for m in modules for holder in (m._parameters, m._buffers)]
        self.places = [(holder, name) for holder in holders for name in holder]
        """Where modules hold them, since others may take a place."""
        self.units: list[FSDPModule] = [m for m in modules if isinstance(m, FSDPModule)]
        self.gathers = [gather for m in modules for gather in gathers_of(m).values()]

    def now(self) -> list[Tensor | None]:
        """Those that are in their places now."""
        return [holder.get(name) for holder, name in self.places]

    def parameters(self) -> list[nn.Parameter]:
        return [t for t in self.now() if isinstance(t, nn.Parameter)]

    def form_of(self, inputs: dict[str, Any], labels: Tensor, tokens: Any) -> list[Any]:
        """All that a graph of a step cannot change: what is not the values of tensors.

        A batch with other values than tensors and PLAIN ones has a form that equals no other, and
        so has one whose gradients FSDP2 keeps to itself, to reduce them with those of a later one.
        """
        form: list[Any] = [isinstance(tokens, Tensor)]
        for name, v in (*sorted(inputs.items()), ("labels", labels)):
            if isinstance(v, Tensor):
                form.append((name, v.shape, v.dtype, v.device))
            else:
                form.append((name, v if type(v) in PLAIN else object()))
        for t in self.now():
            where = None if t is None else getattr(t, "_local_tensor", t).data_ptr()
            form.append((where, t is not None and t.requires_grad))
        for unit in self.units:
            if (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
                reduces = group.reduce_grads and group.all_reduce_grads
                form.append(group.gradient_divide_factor if reduces else object())
        return form

    def forget_evaluations(self) -> None:
        """Has the next step gather what a captured one gathers, also if a rank runs it eagerly.

        FSDP2 keeps the order of all forwards since the last backward, which gathers ahead by it.
        An evaluation also leaves some weights gathered. A captured step must gather its own, and
        none may be left that was gathered before a replay, since the optimizer changes it after.
        """
        for unit in self.units:
            unit.reshard()
            state = unit._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            if (group := state._fsdp_param_group) is not None:
                group._post_forward_indices.clear()

    def expect_quantized(self, fresh: bool) -> None:
        """Says whether gathers find weights in FP8 that have been quantized since they changed."""
        for gather in self.gathers:
            gather.fresh = fresh and gather.together is not None


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
    """A step that has been captured, and runs when it is replayed."""

    def __init__(self, step: Step, batch: Batch, model: ModelTensors, stream: Any, pool: Any):
        self.batch, self.pool = batch, pool

        def run() -> None:
            self.loss = step(*batch.arguments()).detach()
            join_fsdp_streams(stream, model.units)

        self.parameters = model.parameters()
        self.graph = Graph(run, stream, pool)
        self.gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]

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


def join_fsdp_streams(stream: torch.cuda.Stream, units: list[FSDPModule]) -> None:
    """Has `stream` wait for those of FSDP2 that belong to its capture, as a capture must end."""
    # All units have the same ones.
    for other in vars(units[0]._get_fsdp_state()._comm_ctx).values() if units else ():
        if isinstance(other, torch.cuda.Stream):
            with torch.cuda.stream(other):
                belongs = torch.cuda.is_current_stream_capturing()
            if belongs:
                stream.wait_stream(other)
