"""Everything of torchtitan 0.3's and PyTorch's that titan_fp8 replaces while it runs.

`PATCHES` is the whole list; `titan_fp8/patches.py` explains what a patch is. Converting a config is
no patch: it changes one tree of configs, as torchtitan's converters do. Nor is the hook after the
step of every optimizer (`fsdp.py`), which PyTorch offers.
"""

from titan_fp8 import patches as shared
from titan_fp8.patches import Patch, Target, torchtitan_on_cpu

CUDA_GRAPHS_CHECK = Patch(
    name="check of CUDA graphs",
    targets=(Target("torchtitan.trainer:Trainer.Config._validate_cuda_graphs", ("self",)),),
    why="A CUDA graph trains on FP8 weights of its first step, and `health_freq` sees none of it.",
    until="QuantizedShard (shards.py) keeps its memory, and observed steps run without the graph.",
    required=True,
)

STEP_HEALTH = Patch(
    name="health of a step",
    targets=(Target("torchtitan.trainer:Trainer.train_step", ("self", "data_iterator")),),
    why="`health_freq` reports nothing, since the trainer has no hook after a step.",
    until="the trainer calls converters after each step, with the step and the logger of metrics.",
)

GROUP_TIMEOUT = Patch(
    name="group timeout",
    targets=(Target("torch.distributed:set_timeout", may_be_absent=True),),
    relies_on=(Target("torch.distributed.distributed_c10d:_set_pg_timeout", ("timeout", "group")),),
    why="Training ends after its first step: the trainer calls what released torch lacks.",
    until="torch 2.13 need not be supported.",
)

TORCHTITAN_ON_CPU = torchtitan_on_cpu(
    Target("torchtitan.components.checkpointer:CheckpointManager.load", ("self", "step")),
    Target("torchtitan.config.manager:ConfigManager.parse_args", ("self", "args")),
)

FOR_FP8 = (*shared.FOR_FP8, CUDA_GRAPHS_CHECK, STEP_HEALTH)
ON_CONVERSION = (*FOR_FP8, *shared.FOR_HOST)
PATCHES = (GROUP_TIMEOUT, *ON_CONVERSION, shared.FP8_GATHERS, shared.CPU, TORCHTITAN_ON_CPU)
"""By what applies them: the import of the adapter, the converters for FP8 and by host/, `cpu_host`.
"""
