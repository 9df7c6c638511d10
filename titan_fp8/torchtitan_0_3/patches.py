"""Everything of torchtitan 0.3's and PyTorch's that titan_fp8 replaces while it runs.

`PATCHES` is the whole list; `titan_fp8/patches.py` explains what a patch is. Converting a config is
no patch: it changes one tree of configs, as torchtitan's converters do.
"""

from titan_fp8.patches import (
    CHECKPOINT_RANGES,
    CPU_DEVICE_MODULE,
    CPU_DEVICE_TYPE,
    CPU_GRADIENT_SUM,
    FEWER_OPS,
    FP8_GATHERS,
    GRADIENT_COPIES,
    GRADIENT_REDUCTION,
    PROFILER_RANGES,
    RECOMPUTABLE_QUANTIZERS,
    SAC_POLICY,
    Patch,
    Target,
)

QUANTIZATION_CHECK = Patch(
    name="quantization check",
    targets=(Target("torchtitan.trainer:has_quantization", ("model_config",)),),
    why="The trainer prints no MFU if the model is quantized, and looks for its own classes only.",
    without="The log shows an MFU that relates FP8 training to the peak of bf16.",
    until="torchtitan asks the configs of modules whether they are quantized.",
)

CUDA_GRAPHS_CHECK = Patch(
    name="check of CUDA graphs",
    targets=(Target("torchtitan.trainer:Trainer.Config._validate_cuda_graphs", ("self",)),),
    why="torchtitan replays forward and backward as a CUDA graph by default. `fsdp_all_gather` "
    "gives shards new memory when it quantizes them, and the graph would gather from the old. "
    "`health_freq` observes in Python. Only applied with one of the two (cuda_graphs.py).",
    without="With `fsdp_all_gather` a CUDA graph would train on the weights of its first step, and "
    "`health_freq` would report nothing.",
    until="QuantizedShard (shards.py) keeps its memory, and observed steps run without the graph.",
    required=True,
)

STEP_HEALTH = Patch(
    name="health of a step",
    targets=(Target("torchtitan.trainer:Trainer.train_step", ("self", "data_iterator")),),
    why="The trainer has no hook after a step. Only applied with `health_freq` (health.py).",
    without="`health_freq` reports nothing.",
    until="the trainer calls converters after each step, with the step and the logger of metrics.",
)

GROUP_TIMEOUT = Patch(
    name="group timeout",
    targets=(Target("torch.distributed:set_timeout", may_be_absent=True),),
    relies_on=(Target("torch.distributed.distributed_c10d:_set_pg_timeout", ("timeout", "group")),),
    why="The trainer calls it after the first step, and released versions of torch lack it.",
    without="Training ends after its first step.",
    until="torch 2.13 need not be supported.",
)

CPU_CONFIG = Patch(
    name="CPU config",
    targets=(Target("torchtitan.config.manager:ConfigManager.parse_args", ("self", "args")),),
    why="torchtitan's models use FlexAttention, which has no backward on the CPU, and no flag "
    "chooses another attention.",
    without="Models fail in their first backward on the CPU.",
    until="FlexAttention has a backward on the CPU.",
    required=True,
)

CPU_SEED_WARNING = Patch(
    name="CPU seed warning",
    targets=(
        Target("torchtitan.components.checkpointer:CheckpointManager.load", ("self", "step")),
    ),
    why="DTensor has no random numbers for CPU meshes: without a checkpoint every rank initializes "
    "its shard with the same values.",
    without="Sharded runs without a seed checkpoint start from repeated values without a warning.",
    until="DTensor draws random numbers on CPU meshes.",
)

ON_IMPORT = (GROUP_TIMEOUT,)
ON_CONVERSION = (
    SAC_POLICY,
    CHECKPOINT_RANGES,
    RECOMPUTABLE_QUANTIZERS,
    FEWER_OPS,
    GRADIENT_COPIES,
    GRADIENT_REDUCTION,
    PROFILER_RANGES,
    QUANTIZATION_CHECK,
    CUDA_GRAPHS_CHECK,
    STEP_HEALTH,
)
ON_FP8_GATHERS = (FP8_GATHERS,)
ON_CPU = (
    CPU_DEVICE_TYPE,
    CPU_DEVICE_MODULE,
    CPU_GRADIENT_SUM,
    CPU_CONFIG,
    CPU_SEED_WARNING,
)
PATCHES = (*ON_IMPORT, *ON_CONVERSION, *ON_FP8_GATHERS, *ON_CPU)
"""By when they are applied: the import of the adapter, the converters, `titan_fp8.cpu_host`."""
