"""How titan_fp8 patches torchtitan and PyTorch, and the patches that torchtitan 0.2 and 0.3 share.

Each `Patch` names its targets, why they are replaced and when that can go; the log says what it
gains ("Which mechanisms still pay"). The code that needs a patch applies it: search for its
constant, such as SAC_POLICY, to find the replacement. `torchtitan_0_2/patches.py` and
`torchtitan_0_3/patches.py` have the patches that only one version needs, and the list of all that
it gets.

`Patch.apply` checks that every target exists and takes the parameters that the replacement relies
on. If not, a required patch raises; any other is left out with one warning, and the results of
training stay the same.

Nothing here imports torchtitan: `cpu_host` applies CPU before torchtitan is imported.
"""

import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import torch

_logger = logging.getLogger()  # torchtitan's own
_ABSENT = object()


class _Replaced(NamedTuple):
    original: Any
    replacement: Any


_replaced: dict[str, _Replaced] = {}
"""The path of each target that is replaced now -> the original and the replacement."""


@dataclass(frozen=True)
class Target:
    """An attribute, as "package.module:attribute" or "package.module:Class.attribute"."""

    path: str

    parameters: tuple[str | EllipsisType, ...] | None = None
    """The names of a function's parameters; a final `...` allows others. None: not checked."""

    may_be_absent: bool = False
    """The patch may add the attribute."""

    def locate(self) -> tuple[Any, str]:
        """The object that has the attribute, and the attribute's name."""
        name, _, path = self.path.partition(":")
        *parents, attribute = path.split(".")
        module = sys.modules["__main__"]
        if getattr(module.__spec__, "name", None) != name:  # It is not what `python -m` runs.
            module = importlib.import_module(name)
        return functools.reduce(getattr, parents, module), attribute

    def original(self) -> Any:
        """The value without our replacement; if others have replaced ours since, their value."""
        owner, attribute = self.locate()
        value = getattr(owner, attribute, _ABSENT)
        if getattr(value, "__isabstractmethod__", False):  # of a base class
            value = _ABSENT
        if value is _ABSENT and not self.may_be_absent:
            raise AttributeError(self.path)
        # Compared by value: torch's config modules copy theirs.
        replaced = _replaced.get(self.path)
        return replaced.original if replaced and replaced.replacement == value else value

    def problem(self) -> str | None:
        """Why it cannot be replaced; None if it can."""
        try:
            original = self.original()
        except (ImportError, AttributeError):
            return f"{self.path} is missing"
        if self.parameters is None:
            return None
        found = list(inspect.signature(original).parameters)
        expected = [name for name in self.parameters if name is not ...]
        if found != expected and not (... in self.parameters and set(expected) <= set(found)):
            return f"{self.path} takes ({', '.join(found)}), expected ({', '.join(expected)})"
        return None

    def replace(self, make: Callable[[Any], Any]) -> None:
        """Sets the attribute to `make(original)`. A second call starts from the original again."""
        owner, attribute = self.locate()
        original = self.original()
        replacement = make(original)
        setattr(owner, attribute, replacement)
        _replaced[self.path] = _Replaced(original, replacement)


@dataclass(frozen=True)
class Kernel(Target):
    """PyTorch's kernel of an op for the CPU, as "aten::mm.out"; its first argument is a key set.

    If `make` returns the original, nothing is replaced.
    """

    def original(self) -> Callable:
        try:
            return torch.library.get_kernel(self.path, "CPU").call_boxed
        except RuntimeError as error:
            raise AttributeError(self.path) from error

    def replace(self, make: Callable[[Any], Any]) -> None:
        if earlier := _replaced.pop(self.path, None):
            earlier.replacement._destroy()
        original = self.original()
        if (replacement := make(original)) is original:
            return
        namespace, _, name = self.path.partition("::")
        library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            # PyTorch warns that kernels are overridden, but that is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, replacement, "CPU", with_keyset=True, allow_override=True)
        _replaced[self.path] = _Replaced(original, library)


@dataclass(frozen=True)
class Patch:
    """Targets that are replaced together or not at all."""

    name: str
    targets: tuple[Target, ...]
    why: str
    """What is so, for the user too, where the patch cannot be applied."""
    until: str
    """What has to happen before it can go."""
    required: bool = False
    relies_on: tuple[Target, ...] = ()
    """What the replacement uses without replacing it, checked like the targets."""

    def apply(self, *makes: Callable[[Any], Any]) -> bool:
        """Replaces each target by what its `make` returns for the original.

        Applying a patch again starts from the originals, so only the last call counts.

        Returns:
            Whether it was applied.

        Raises:
            RuntimeError: the patch is required, and a target is missing or has changed.
        """
        found = (target.problem() for target in (*self.relies_on, *self.targets))
        if problem := next(filter(None, found), None):
            message = f"titan_fp8: patch {self.name!r} does not apply: {problem}. {self.why}"
            if self.required:
                raise RuntimeError(message)
            log_once(logging.WARNING, message)
            return False
        for target, make in zip(self.targets, makes, strict=True):
            target.replace(make)
        replaced = ", ".join(target.path for target in self.targets if target.path in _replaced)
        log_once(logging.INFO, f"titan_fp8: patch {self.name!r} replaces {replaced}")
        return True


@functools.cache
def log_once(level: int, message: str) -> None:
    """Logs a message, unless this process has logged it before."""
    _logger.log(level, message)


_FSDP = "torch.distributed.fsdp._fully_shard"

# What FP8 needs

SAC_POLICY = Patch(
    name="selective checkpointing policy",
    targets=(
        Target(
            "torchtitan.distributed.activation_checkpoint:ptd_checkpoint_wrapper",
            ("module", "checkpoint_impl", "checkpoint_fn", "checkpoint_fn_kwargs"),
        ),
    ),
    relies_on=(Target("torch.utils.checkpoint:_CachingTorchDispatchMode", ("policy_fn", ...)),),
    why="Op-level activation checkpointing recomputes each FP8 GEMM, which it does not know.",
    until="torchtitan's policy counts ops of a list that converters can extend.",
)

RECOMPUTABLE_QUANTIZERS = Patch(
    name="recomputable quantizers",
    targets=(Target("torch._functorch.partitioners:get_default_op_list", ()),),
    relies_on=(
        Target("torch._functorch.partitioners:OpTypes", ("fusible_ops", "recomputable_ops", ...)),
    ),
    why="torch.compile recomputes no custom op, so it saves FP8 copies of inputs: more memory.",
    until="torch.library has a tag for ops that are cheap to recompute.",
)

FEWER_OPS = Patch(
    name="fewer ops",
    targets=(Target("torch._inductor.config:post_grad_custom_post_pass"),),
    why="torch.compile neither merges custom ops nor drops outputs that nobody reads: slower.",
    until="torch.compile launches custom ops as cheaply as its own kernels.",
)

FOR_FP8 = (SAC_POLICY, RECOMPUTABLE_QUANTIZERS, FEWER_OPS)

FP8_GATHERS = Patch(
    name="FP8 gathers",
    targets=(
        Target(f"{_FSDP}._fsdp_param:FSDPParam._sharded_local_tensor"),
        Target(f"{_FSDP}._fsdp_param:FSDPParam.reset_sharded_param", ("self",)),
    ),
    relies_on=(Target(f"{_FSDP}._fsdp_param:FSDPParam._init_extensions", ("self",)),),
    why="FSDP2 cannot gather weights in FP8. Set fsdp_all_gather = false.",
    until="FSDP2 takes extensions that are not part of a parameter's local tensor.",
    required=True,
)

# What speeds up jobs without FP8, too (host/)

GRADIENT_REDUCTION = Patch(
    name="gradient reduction",
    targets=(
        Target(
            f"{_FSDP}._fsdp_param_group:foreach_reduce",
            (
                *("fsdp_params", "unsharded_grads", "reduce_scatter_group"),
                *("reduce_scatter_stream", "reduce_scatter_comm", "orig_dtype", "reduce_dtype"),
                *("device", "gradient_divide_factor", "all_reduce_group", "all_reduce_stream"),
                *("all_reduce_grads", "partial_reduce_output", "all_reduce_hook"),
                "force_sum_reduction_for_comms",
            ),
        ),
        Target(f"{_FSDP}._fsdp_param:FSDPParam.to_accumulated_grad_if_needed", ("self",)),
    ),
    relies_on=(Target(f"{_FSDP}._fsdp_collectives:DefaultReduceScatter"),),
    why="FSDP2 sends bf16 gradients as FP32, twice the bytes.",
    until="FSDP2 sends gradients in their own dtype.",
)

PROFILER_RANGES = Patch(
    name="profiler ranges",
    targets=(
        Target(f"{_FSDP}._fsdp_param_group:record_function", ("name", ...)),
        Target(
            f"{_FSDP}._fsdp_state:FSDPState._root_pre_forward", ("self", "module", "args", "kwargs")
        ),
    ),
    why="More CPU time; on torch 2.13 op-level checkpointing fails with experts under FSDP2.",
    until="record_function costs nothing without a profiler, and checkpoints ignore its ops.",
)

FOR_HOST = (GRADIENT_REDUCTION, PROFILER_RANGES)

# What torchtitan needs on a machine without an accelerator (cpu_host/)

BF16_KERNELS = tuple(
    Kernel(f"aten::{name}")
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mm.out", "addmm.out", "bmm.out", "baddbmm.out"),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
"""Replaced on CPUs without bf16 kernels of oneDNN (cpu_host/bf16.py)."""


CPU = Patch(
    name="CPU",
    targets=(
        Target("torch._utils:_get_available_device_type", ()),
        *(
            Target(f"torch.cpu:{name}", may_be_absent=True)
            for name in (
                *("get_device_name", "get_device_properties", "memory_stats"),
                *("reset_peak_memory_stats", "empty_cache", "current_device"),
            )
        ),
        Target("torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor", ("self", "factor")),
        *BF16_KERNELS,
    ),
    why="torchtitan assumes CUDA, and cannot run on this machine, which has no accelerator.",
    until="torchtitan trains on the CPU by itself.",
    required=True,
)


def torchtitan_on_cpu(*targets: Target) -> Patch:
    """What an adapter needs besides, with the targets that its version of torchtitan has."""
    return Patch("torchtitan on the CPU", targets, CPU.why, CPU.until, required=True)
