"""Everything in torchtitan 0.2 and PyTorch that titan_fp8 replaces at run time.

`PATCHES` is the whole list; `titan_fp8/patches.py` explains what a patch is. Converting a module
(FP8Linear, FP8GroupedExperts, FP8FeedForward, GatherMoE) is no patch: it changes one object of the
model, as torchtitan's own converters do.
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

CONFIG_CHECK = Patch(
    name="config check",
    targets=(Target("torchtitan.config.manager:tyro.cli", ("f", "args", ...)),),
    why="ConfigManager.parse_args has no hook for checks that need the whole configuration. It "
    "imports the plugin while it runs, so wrapping parse_args itself would come too late; tyro.cli "
    "is what it calls next, with the command line, and what it returns is the merged JobConfig.",
    without="A [quantize] section whose converter is not listed would be ignored.",
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
    why="Only the adapter of deepseek_v3 has a reader for block-FP8 weights, and without "
    "initial_load_in_hf_quantized no adapter uses one (hf_checkpoint.py).",
    without="An FP8 checkpoint given as initial_load_path may be loaded without its scales.",
    until="torchtitan's StateDictAdapter reads quantized checkpoints and refuses what it cannot.",
)

TOKEN_GROUP_ALIGNMENT = Patch(
    name="token group alignment",
    targets=(Target("torchtitan.models.moe.utils:TOKEN_GROUP_ALIGN_SIZE_M"),),
    why="torchtitan's dispatch pads each expert's tokens to a multiple of this global. At 128 no "
    "1x128 scale block crosses two experts. set_token_group_alignment_size_m assigns the same "
    "global, and its signature allows 8, 16 and 32.",
    without="The quantizers pad the tokens of each FP8 expert: slower.",
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
    until="torchtitan permutes by gathers.",
)

TOKEN_EXCHANGE = Patch(
    name="token exchange",
    targets=tuple(
        Target(
            f"torchtitan.distributed.expert_parallel:{name}",
            ("self", "output_split_sizes", "input_split_sizes", "group", "tag"),
        )
        for name in ("all_to_all_single", "all_to_all_single_autograd")
    ),
    relies_on=(
        Target("torch._C:_AutoDispatchBelowAutograd"),
        Target("torch.distributed._functional_collectives:AsyncCollectiveTensor"),
    ),
    why="PyTorch's functional all-to-alls spend CPU time on checks, and on autograd functions "
    "written in Python (token_exchange.py).",
    without="PyTorch's functions run: more CPU time.",
    until="functional collectives take less CPU time.",
)

TOKEN_DISPATCH = Patch(
    name="token dispatch",
    targets=(
        Target(
            "torchtitan.distributed.expert_parallel:ExpertParallel._token_dispatch",
            ("self", "mod", "inputs", "device_mesh"),
        ),
    ),
    relies_on=(
        Target("torchtitan.distributed.expert_parallel:_permute"),
        *TOKEN_EXCHANGE.relies_on,
    ),
    why="torchtitan exchanges the token counts after FSDP2's hook on the experts, and sums and "
    "copies twice to the CPU what each rank sends and receives; the GPU waits for all of it "
    "(token_exchange.py).",
    without="torchtitan's dispatch runs: more CPU time.",
    until="torchtitan exchanges the counts earlier.",
)

TOKEN_COMBINE = Patch(
    name="token combine",
    targets=(
        Target(
            "torchtitan.distributed.expert_parallel:ExpertParallel._token_combine",
            ("self", "mod", "routed_output", "device_mesh"),
        ),
    ),
    why="torchtitan returns tokens in a hook on the experts. Tokens that a layer exchanges by "
    "itself must pass it unchanged, as they pass the dispatch (peer_exchange.py).",
    without="Tokens travel by torchtitan's all-to-alls: slower, and only in high precision.",
    until="torchtitan lets a layer exchange its tokens by itself.",
)

CHECKPOINT_MARKS = Patch(
    name="checkpoint marks",
    targets=(Target("torch._inductor.config:joint_custom_pre_pass"),),
    why="In a block under full activation checkpointing torch 2.11 does not mark the ops of an "
    "autograd.Function for recomputation (recomputation.py).",
    without="Full checkpointing of compiled blocks saves the outputs of FP8 GEMMs: more memory.",
    until="torch 2.11 need not be supported.",
)

INPUT_STREAM = Patch(
    name="input stream",
    targets=(
        Target("torchtitan.train:Trainer.train_step", ("self", "data_iterator")),
        Target(
            "torchtitan.train:Trainer.forward_backward_step",
            ("self", "input_dict", "labels", "global_valid_tokens"),
        ),
    ),
    why="The trainer copies each batch to the GPU, and counts its tokens, in a way that makes the "
    "CPU wait for the optimizer of the previous step (input_stream.py).",
    without="The GPU waits for the CPU at the beginning of each step: slower with small batches.",
    until="the trainer copies batches without blocking and keeps the token count on the GPU.",
)

STEP_METRICS = Patch(
    name="step metrics",
    targets=(
        Target("torchtitan.components.metrics:MetricsProcessor.should_log", ("self", "step")),
    ),
    why="Converters have a hook after each step, but it knows neither the step nor the logger of "
    "metrics. The trainer calls this method after each step, on each rank, with the step; its "
    "object has the logger and the model. Only applied with `health_freq` (health.py).",
    without="`health_freq` reports nothing.",
    until="post_optimizer_hook gets the step and the metrics processor.",
)

CPU_HISTC = Patch(
    name="CPU histc of integers",
    targets=(Target("torch:histc"),),
    why="torchtitan's router counts the tokens of each expert by torch.histc of integers, and the "
    "CPU kernel takes floats only.",
    without="MoE models fail in their router on the CPU.",
    until="torch.histc takes integers on the CPU.",
)

CPU_PERMUTE_INDICES = Patch(
    name="CPU permute indices",
    targets=(Target("torchtitan.models.moe.kernels:fill_indices_wrapper"),),
    relies_on=(Target("torchtitan.models.moe.kernels:fill_indices_cpu"),),
    why="The token permutation calls a Triton kernel; torchtitan has a CPU version beside it.",
    without="Expert parallelism fails on the CPU.",
    until="torchtitan chooses the CPU version by itself.",
)

CPU_SEED_WARNING = Patch(
    name="CPU seed warning",
    targets=(Target("torchtitan.components.checkpoint:CheckpointManager.load", ("self", "step")),),
    why="DTensor has no random numbers for CPU meshes: without a checkpoint every rank initializes "
    "its shard with the same values.",
    without="Sharded runs without a seed checkpoint start from repeated values without a warning.",
    until="DTensor draws random numbers on CPU meshes.",
)

ON_IMPORT = (CONFIG_CHECK, FP8_CHECKPOINTS)
ON_CONVERSION = (
    TOKEN_GROUP_ALIGNMENT,
    PERMUTATION,
    TOKEN_EXCHANGE,
    TOKEN_DISPATCH,
    TOKEN_COMBINE,
    SAC_POLICY,
    CHECKPOINT_RANGES,
    RECOMPUTABLE_QUANTIZERS,
    CHECKPOINT_MARKS,
    FEWER_OPS,
    GRADIENT_COPIES,
    GRADIENT_REDUCTION,
    PROFILER_RANGES,
    INPUT_STREAM,
    STEP_METRICS,
)
ON_FP8_GATHERS = (FP8_GATHERS,)
ON_CPU = (
    CPU_DEVICE_TYPE,
    CPU_DEVICE_MODULE,
    CPU_GRADIENT_SUM,
    CPU_HISTC,
    CPU_PERMUTE_INDICES,
    CPU_SEED_WARNING,
)
PATCHES = (*ON_IMPORT, *ON_CONVERSION, *ON_FP8_GATHERS, *ON_CPU)
"""In the order of application: plugin.py's import, the converters, `titan_fp8.cpu_host`."""
