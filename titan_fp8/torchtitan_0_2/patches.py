"""Everything in torchtitan 0.2 and PyTorch that titan_fp8 replaces at run time.

`PATCHES` is the whole list; `titan_fp8/patches.py` explains what a patch is. Converting a module
(FP8Linear, FP8GroupedExperts, FP8FeedForward, GatherMoE) is no patch: it changes one object of the
model, as torchtitan's own converters do. Nor are switches that PyTorch and torchtitan offer: the
alignment of token groups (`experts.py`), autograd's multithreading (`speedups.py`), and with
`cuda_graph` `activation_checkpoint.preserve_rng_state` (`cuda_graph.py`) and the variable
NCCL_GRAPH_REGISTER (`config.py`).
"""

from titan_fp8 import patches as shared
from titan_fp8.patches import Patch, Target, torchtitan_on_cpu

CONFIG_CHECK = Patch(
    name="config check",
    # parse_args imports the plugin while it runs, and calls this next, with the command line.
    targets=(Target("torchtitan.config.manager:tyro.cli", ("f", "args", ...)),),
    why="torchtitan ignores a [quantize] section whose converter is not listed.",
    until="torchtitan lets a custom config module validate the merged JobConfig.",
    required=True,
)

FP8_CHECKPOINTS = Patch(
    name="FP8 Hugging Face checkpoints",
    targets=(
        Target(
            "torchtitan.components.checkpoint:CheckpointManager.dcp_load",
            ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized"),
        ),
    ),
    why="An FP8 checkpoint given as initial_load_path may be loaded without its scales.",
    until="torchtitan's StateDictAdapter reads quantized checkpoints and refuses what it cannot.",
)

STEP_METRICS = Patch(
    name="step metrics",
    targets=(
        Target("torchtitan.components.metrics:MetricsProcessor.should_log", ("self", "step")),
    ),
    why="`health_freq` reports nothing, since the hook after a step knows no step and no logger.",
    until="post_optimizer_hook gets the step and the metrics processor.",
)

TOKEN_EXCHANGE = Patch(
    name="token exchange",
    targets=(
        Target(
            "torchtitan.distributed.expert_parallel:ExpertParallel._token_dispatch",
            ("self", "mod", "inputs", "device_mesh"),
        ),
        Target(
            "torchtitan.distributed.expert_parallel:ExpertParallel._token_combine",
            ("self", "mod", "routed_output", "device_mesh"),
        ),
    ),
    relies_on=(
        Target("torchtitan.models.moe.utils:TOKEN_GROUP_ALIGN_SIZE_M"),
        Target("torch._C:_AutoDispatchBelowAutograd"),
        Target("torch.distributed._functional_collectives:AsyncCollectiveTensor"),
    ),
    why="torchtitan permutes by index_put, and exchanges tokens in more CPU time: slower.",
    until="torchtitan permutes by gathers, and functional collectives take less CPU time.",
)

STEP_GRAPH = Patch(
    name="step graph",
    targets=(
        Target(
            "torchtitan.train:Trainer.forward_backward_step",
            ("self", "input_dict", "labels", "global_valid_tokens"),
        ),
        Target("torchtitan.train:Trainer.close", ("self",)),
        Target(
            "torchtitan.components.checkpoint:CheckpointManager.dcp_save",
            ("self", "state_dict", "checkpoint_id", ...),
        ),
    ),
    why="`cuda_graph` can do nothing.",
    until="torchtitan 0.2 need not be supported: 0.3 captures its steps.",
    required=True,
)

TORCHTITAN_ON_CPU = torchtitan_on_cpu(
    Target("torchtitan.components.checkpoint:CheckpointManager.load", ("self", "step")),
    Target("torch:histc"),
    Target("torchtitan.models.moe.kernels:fill_indices_wrapper"),
)

FOR_FP8 = (*shared.FOR_FP8, STEP_METRICS)
FOR_HOST = (*shared.FOR_HOST, TOKEN_EXCHANGE, STEP_GRAPH)
ON_CONVERSION = (*FOR_FP8, *FOR_HOST)
ON_IMPORT = (CONFIG_CHECK, FP8_CHECKPOINTS)
PATCHES = (*ON_IMPORT, *ON_CONVERSION, shared.FP8_GATHERS, shared.CPU, TORCHTITAN_ON_CPU)
"""By what applies them: plugin.py's import, converters for FP8 and by speedups.py, `cpu_host`."""
