"""Everything of torchtitan's and PyTorch's that titan_fp8 replaces while it runs.

`PATCHES` is the whole list. Each `Patch` names its targets, why they are replaced, the versions it
was tried with, what it gains and when it can go. The code that needs a patch applies it: search for
the name of the record to find the replacement. Converting a module (FP8Linear, FP8GroupedExperts,
FP8FeedForward, GatherMoE) is no patch: it changes one object, as torchtitan's converters do.

`Patch.apply` first checks that every target exists and takes the parameters that the replacement
relies on. Where that fails, a required patch raises; any other is left out with one warning, and
the results of training stay the same.

Nothing here imports torchtitan: `cpu_host` applies its patches before torchtitan is imported.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

_logger = logging.getLogger()  # torchtitan's own
_ABSENT = object()


class _Replaced(NamedTuple):
    original: Any
    replacement: Any


_replaced: dict[str, _Replaced] = {}
"""What is replaced now, by the target's path."""


@dataclass(frozen=True)
class Target:
    """An attribute, as "package.module:attribute" or "package.module:Class.attribute"."""

    path: str

    parameters: tuple[str | EllipsisType, ...] | None = None
    """The names of a function's parameters; a final `...` allows others. None: not checked."""

    may_be_absent: bool = False

    def locate(self) -> tuple[Any, str]:
        """The object that has the attribute, and the attribute's name."""
        module, _, path = self.path.partition(":")
        *parents, attribute = path.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(module)), attribute

    def original(self) -> Any:
        """The value without our replacement. A later replacement by others counts as original."""
        owner, attribute = self.locate()
        value = getattr(owner, attribute, _ABSENT)
        if value is _ABSENT and not self.may_be_absent:
            raise AttributeError(self.path)
        # Compared by value: torch's config modules copy theirs.
        replaced = _replaced.get(self.path)
        return replaced.original if replaced and replaced.replacement == value else value

    def problem(self) -> str | None:
        """What keeps us from replacing it, if anything."""
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
        """Puts `make(original)` in place; from the original again if it has been replaced."""
        owner, attribute = self.locate()
        original = self.original()
        replacement = make(original)
        setattr(owner, attribute, replacement)
        _replaced[self.path] = _Replaced(original, replacement)

    def restore(self) -> None:
        """Puts the original back, if our replacement is still there."""
        replaced = _replaced.pop(self.path, None)
        owner, attribute = self.locate()
        if replaced is None or getattr(owner, attribute, _ABSENT) != replaced.replacement:
            return
        if replaced.original is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, replaced.original)


@dataclass(frozen=True)
class Patch:
    """Targets that are replaced together or not at all."""

    name: str
    targets: tuple[Target, ...]
    why: str
    without: str
    """What changes for the user where the patch cannot be applied."""
    versions: str
    """Those with which it was tried."""
    gain: str
    until: str
    """When it can go."""
    required: bool = False
    relies_on: tuple[Target, ...] = ()
    """What the replacement uses and leaves as it is."""

    def apply(self, *makes: Callable[[Any], Any]) -> bool:
        """Replaces each target by what its `make` returns for the original.

        Applying it again starts from the originals, so the last call counts.

        Returns:
            Whether it was applied.

        Raises:
            RuntimeError: the patch is required, and a target is missing or has changed.
        """
        assert len(makes) == len(self.targets)
        problems = [target.problem() for target in (*self.targets, *self.relies_on)]
        if problem := next(filter(None, problems), None):
            message = f"titan_fp8: patch {self.name!r} does not apply: {problem}. {self.without}"
            if self.required:
                raise RuntimeError(f"{message} Tried with {self.versions}.")
            _log_once(logging.WARNING, message)
            return False
        for target, make in zip(self.targets, makes):
            target.replace(make)
        replaced = ", ".join(target.path for target in self.targets)
        _log_once(logging.INFO, f"titan_fp8: patch {self.name!r} replaces {replaced}")
        return True


def restore(patches: Iterable[Patch]) -> None:
    """Puts back the originals of all `patches`; for tests."""
    for patch in patches:
        for target in patch.targets:
            target.restore()
    _log_once.cache_clear()


@functools.cache
def _log_once(level: int, message: str) -> None:
    _logger.log(level, message)


TORCHTITAN = "torchtitan 0.2.2"
TORCH = "torch 2.11 and 2.13"

CONFIG_CHECK = Patch(
    name="config check",
    targets=(Target("torchtitan.config.manager:tyro.cli", ("f", "args", ...)),),
    why="ConfigManager.parse_args has no hook for checks that need the whole configuration. It "
    "imports the plugin while it runs, so wrapping parse_args itself would come too late; tyro.cli "
    "is what it calls next, with the command line, and what it returns is the merged JobConfig.",
    without="A [quantize] section whose converter is not listed would be ignored.",
    versions=f"{TORCHTITAN}, tyro 1.0",
    gain="A section that nothing reads is an error before training starts.",
    until="torchtitan lets a custom config module validate the merged JobConfig.",
    required=True,
)

TOKEN_GROUP_ALIGNMENT = Patch(
    name="token group alignment",
    targets=(Target("torchtitan.models.moe.utils:TOKEN_GROUP_ALIGN_SIZE_M"),),
    why="torchtitan's dispatch pads each expert's tokens to a multiple of this global. At 128 no "
    "1x128 scale block crosses two experts. set_token_group_alignment_size_m assigns the same "
    "global, and its signature allows 8, 16 and 32.",
    without="FP8 experts lay out their tokens by themselves: slower.",
    versions=TORCHTITAN,
    gain="Groups need no layout pass of their own; not measured apart.",
    until="torchtitan lets a converter choose the alignment.",
)

PERMUTATION = Patch(
    name="permutation",
    targets=(
        Target(
            "torchtitan.distributed.expert_parallel:_permute",
            ("x", "num_tokens_per_expert", "ep_degree", "num_local_experts"),
        ),
        Target(
            "torchtitan.distributed.expert_parallel:_unpermute",
            ("out", "input_shape", "permuted_indices"),
        ),
    ),
    why="torchtitan permutes by index_put in _unpermute and in the backward of _permute; gathers "
    "do the same in each direction and each pass (permutation.py).",
    without="torchtitan's permutation runs: slower.",
    versions=TORCHTITAN,
    gain="DeepSeekV3-16B in bf16, 2 H200s, EP 2: 1.18x (with the gathers of moe.py).",
    until="torchtitan permutes by gathers.",
)

SAC_POLICY = Patch(
    name="selective checkpointing policy",
    targets=(
        Target(
            "torchtitan.distributed.activation_checkpoint:ptd_checkpoint_wrapper",
            ("module", "checkpoint_impl", "checkpoint_fn", "checkpoint_fn_kwargs"),
        ),
    ),
    relies_on=(Target("torch.utils.checkpoint:_CachingTorchDispatchMode", ("policy_fn", ...)),),
    why="torchtitan's op-level policy saves every second aten.mm and recomputes ops it does not "
    "know. Dense FP8 GEMMs are reported to it as aten.mm (activation_checkpointing.py).",
    without="Op-level activation checkpointing recomputes every FP8 GEMM: slower, less memory.",
    versions=f"{TORCHTITAN}, {TORCH}",
    gain="Llama3-8B, 1 H200, op-level checkpointing: 12,070 tokens/s instead of 11,450, with the "
    "memory of bf16 (63.8 GiB; 61.0 without). DeepSeekV3-16B, 2 H200s: nothing beyond the noise.",
    until="torchtitan's policy counts ops of a list that converters can extend.",
)

RECOMPUTABLE_QUANTISERS = Patch(
    name="recomputable quantisers",
    targets=(Target("torch._functorch.partitioners:get_default_op_list", ()),),
    relies_on=(
        Target("torch._functorch.partitioners:OpTypes", ("fusible_ops", "recomputable_ops", ...)),
    ),
    why="AOTAutograd's partitioner never recomputes a custom op, so it would save the transposed "
    "FP8 copy of every input for wgrad. It has no public list of recomputable ops "
    "(recomputation.py).",
    without="torch.compile saves FP8 copies of the layers' inputs for backward: more memory.",
    versions=TORCH,
    gain="Llama3-8B, 1 H200, no checkpointing: 72.6 GiB instead of 75.3, the same speed.",
    until="torch.library has a tag for ops that are cheap to recompute.",
)

CHECKPOINT_MARKS = Patch(
    name="checkpoint marks",
    targets=(Target("torch._inductor.config:joint_custom_pre_pass"),),
    why="In a block under full activation checkpointing torch 2.11 does not mark the ops of an "
    "autograd.Function for recomputation (recomputation.py).",
    without="Full checkpointing of compiled blocks saves the outputs of FP8 GEMMs: more memory.",
    versions=TORCH,
    gain="Llama3-8B, 1 H200, full checkpointing: 61.3 GiB instead of 71.4, at 0.89 of the speed.",
    until="torch 2.11 need not be supported.",
)

SINGLE_RANK_COPY = Patch(
    name="single-rank gradient copy",
    targets=(
        Target(
            "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce_scatter_copy_in",
            ("unsharded_grads", "reduce_scatter_input", "world_size"),
        ),
    ),
    why="With expert parallelism over all ranks FSDP2 reduces the experts' gradients over groups "
    "of one rank, and its chunk_cat builds a table of chunks on the CPU each time (fsdp.py).",
    without="FSDP2 copies gradients by chunk_cat: more CPU time.",
    versions=TORCH,
    gain="DeepSeekV3-16B, 2 H200s, EP 2: median 18.5 thousand tokens/s a GPU (four runs, 16.1 to "
    "18.9) instead of 16.9 (two runs, 16.7 and 17.1). bf16, where the GPU is the bottleneck, gains "
    "nothing: 13.4 and 13.7 with and without.",
    until="FSDP2 skips chunk_cat, or the reduction, for groups of one rank.",
)

CPU_DEVICE_TYPE = Patch(
    name="CPU device type",
    targets=(Target("torch._utils:_get_available_device_type", ()),),
    why="torchtitan.tools.utils asks it once, on import, and takes None for CUDA.",
    without="torchtitan cannot run on this machine, which has no accelerator.",
    versions=f"{TORCHTITAN}, torch 2.13",
    gain="torchtitan runs without an accelerator.",
    until="torchtitan takes a machine without accelerators for a CPU.",
    required=True,
)

CPU_DEVICE_MODULE = Patch(
    name="CPU device module",
    targets=tuple(
        Target(f"torch.cpu:{name}", may_be_absent=True)
        for name in (
            *("get_device_name", "get_device_properties", "memory_stats"),
            *("reset_peak_memory_stats", "empty_cache", "current_device"),
        )
    ),
    why="The trainer calls these of its device module, and torch.cpu lacks them. current_device "
    "is there and returns a string, where a barrier takes a number.",
    without="torchtitan's trainer fails in its first call of torch.cpu.",
    versions=f"{TORCHTITAN}, torch 2.13",
    gain="torchtitan runs without an accelerator. Memory is unknown and logged as -0.00.",
    until="torch.cpu has them.",
)

CPU_GRADIENT_SUM = Patch(
    name="CPU gradient sum",
    targets=(
        Target("torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor", ("self", "factor")),
    ),
    why="For a gradient divide factor FSDP2 reduces by PREMUL_SUM, which gloo lacks.",
    without="FSDP2 fails in its first reduction on the CPU.",
    versions="torch 2.13",
    gain="FSDP2 runs on gloo.",
    until="gloo has PREMUL_SUM, or FSDP2 does without where it is missing.",
)

CPU_HISTC = Patch(
    name="CPU histc of integers",
    targets=(Target("torch:histc"),),
    why="torchtitan's router counts the tokens of each expert by torch.histc of integers, and the "
    "CPU kernel takes floats only.",
    without="MoE models fail in their router on the CPU.",
    versions=f"{TORCHTITAN}, torch 2.13",
    gain="MoE models run on the CPU.",
    until="torch.histc takes integers on the CPU.",
)

CPU_PERMUTE_INDICES = Patch(
    name="CPU permute indices",
    targets=(Target("torchtitan.models.moe.kernels:fill_indices_wrapper"),),
    relies_on=(Target("torchtitan.models.moe.kernels:fill_indices_cpu"),),
    why="The token permutation calls a Triton kernel; torchtitan has a CPU version beside it.",
    without="Expert parallelism fails on the CPU.",
    versions=TORCHTITAN,
    gain="Expert parallelism runs on the CPU.",
    until="torchtitan chooses the CPU version by itself.",
)

CPU_SEED_WARNING = Patch(
    name="CPU seed warning",
    targets=(Target("torchtitan.components.checkpoint:CheckpointManager.load", ("self", "step")),),
    why="DTensor has no random numbers for CPU meshes: without a checkpoint every rank initialises "
    "its shard with the same values.",
    without="Sharded runs without a seed checkpoint start from repeated values without a warning.",
    versions=f"{TORCHTITAN}, torch 2.13",
    gain="A warning that names the remedy.",
    until="DTensor draws random numbers on CPU meshes.",
)

ON_IMPORT = (CONFIG_CHECK,)
ON_CONVERSION = (
    *(TOKEN_GROUP_ALIGNMENT, PERMUTATION, SAC_POLICY, RECOMPUTABLE_QUANTISERS),
    *(CHECKPOINT_MARKS, SINGLE_RANK_COPY),
)
ON_CPU = (
    *(CPU_DEVICE_TYPE, CPU_DEVICE_MODULE, CPU_GRADIENT_SUM, CPU_HISTC, CPU_PERMUTE_INDICES),
    CPU_SEED_WARNING,
)
PATCHES = (*ON_IMPORT, *ON_CONVERSION, *ON_CPU)
"""By when they are applied: plugin.py's import, the converters, `python -m titan_fp8.cpu_host`."""
