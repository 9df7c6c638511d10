"""Trains production models under many parallel plans, in bf16 and in FP8, and prints one table.

    NGPU=4 ./scripts/bench_plans.sh [--list] [--steps N] [--recipes bf16,blockwise] [PLAN ...]

Without a PLAN it runs all that use NGPU GPUs (1, 2 or 4). Every run is compiled and has op-level
activation checkpointing. FSDP2 gathers weights in FP8, unless "+bf16_all_gather" follows the
recipe. Results are in outputs/bench_plans: a folder for each run, and the table as result.json,
which render_benchmarks.py reads. A run that fails is reported in the table, the others go on, and
the exit status is 1.

After the N steps, some more are traced (`bench_plans_plugin.py`). They count for neither tokens/s
nor losses. Idle is the share of a step in which no kernel of rank 0 runs. It is taken from the
shortest step of the second trace, which has no events of the CPU; a mean over all steps would be
larger. "gathered GB" is what all-gathers receive; under FSDP alone, they are those of parameters.
The loss is the mean of the last five that were logged.
"""

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import bench_common
from converge_jobs import end_with_parent
from summarize_trace import busy, complete_events, gathered_bytes, gpu_events
from tables import Row
from titan_logs import COLOR, SPEED_FROM_STEP, InputError, read_run

from titan_fp8.recipe import BF16, RECIPE_NAMES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "outputs" / "bench_plans"
IN_BF16 = "+bf16_all_gather"
TRACED = 12
"""Steps at the end in which the profiler warms up or records; they are slower."""
ABOUT = "Every run is compiled and has op-level activation checkpointing."


@dataclass(frozen=True)
class Plan:
    """A model under one parallel plan; degrees as in torchtitan's [parallelism]."""

    config: str
    flavor: str
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    batch: int = 1
    tokens: int = 8192
    micro_batches: int = 1
    dtype: str = "float32"
    reshard: str = "default"
    balanced: bool = False

    @property
    def gpus(self) -> int:
        return self.data_parallel * self.tp * self.cp * self.pp

    @property
    def data_parallel(self) -> int:
        return self.replicate * self.shard

    @property
    def tokens_of_gpu(self) -> float:
        """Tokens per step and GPU, as torchtitan counts them for its tokens/s."""
        of_replica = self.batch * self.tokens * self.micro_batches
        return of_replica * self.data_parallel / self.gpus

    def flags(self) -> list[str]:
        """torchtitan's flags for the model and the plan."""
        values = {
            "model.flavor": self.flavor,
            "parallelism.data_parallel_replicate_degree": self.replicate,
            "parallelism.data_parallel_shard_degree": self.shard,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.expert_parallel_degree": self.ep,
            "parallelism.expert_tensor_parallel_degree": self.etp,
            "parallelism.fsdp_reshard_after_forward": self.reshard,
            "training.local_batch_size": self.batch,
            "training.global_batch_size": self.batch * self.micro_batches * self.data_parallel,
            "training.seq_len": self.tokens,
            "training.dtype": self.dtype,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        }
        flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
        return [*flags, "--compile.enable", *["--debug.moe_force_load_balance"] * self.balanced]


LLAMA, LLAMA_70B, DEEPSEEK = "llama3_8b", "llama3_70b", "deepseek_v3_16b"
MOE = {"batch": 4, "tokens": 4096, "balanced": True}
PLANS = {
    "llama3-8b": Plan(LLAMA, "8B", dtype="bfloat16"),
    "llama3-8b-fsdp2": Plan(LLAMA, "8B", shard=2),
    "llama3-8b-fsdp2-2048": Plan(LLAMA, "8B", shard=2, tokens=2048),
    "llama3-8b-fsdp2-2048-kept": Plan(LLAMA, "8B", shard=2, tokens=2048, reshard="never"),
    "llama3-8b-fsdp2-2048x4": Plan(LLAMA, "8B", shard=2, tokens=2048, micro_batches=4),
    "llama3-8b-tp2": Plan(LLAMA, "8B", tp=2, dtype="bfloat16"),
    "llama3-8b-pp2": Plan(LLAMA, "8B", pp=2, batch=4, tokens=4096, dtype="bfloat16"),
    "llama3-8b-cp2": Plan(LLAMA, "8B", cp=2),
    "llama3-8b-ddp2": Plan(LLAMA, "8B-8-layers", replicate=2),
    "llama3-70b-tp2": Plan(LLAMA_70B, "70B-6-layers", tp=2, dtype="bfloat16"),
    # 16 billion parameters in FP32 with the optimizer's states do not fit on two GPUs.
    "deepseek-16b-ep2": Plan(DEEPSEEK, "16B", shard=2, ep=2, dtype="bfloat16", **MOE),
    "deepseek-16b-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tokens=4096, dtype="bfloat16"),
    "llama3-8b-fsdp4": Plan(LLAMA, "8B", shard=4),
    "llama3-8b-fsdp4-2048": Plan(LLAMA, "8B", shard=4, tokens=2048),
    "llama3-8b-hsdp2x2": Plan(LLAMA, "8B", replicate=2, shard=2),
    "llama3-8b-tp2-fsdp2": Plan(LLAMA, "8B", shard=2, tp=2),
    "llama3-8b-tp4": Plan(LLAMA, "8B", tp=4, dtype="bfloat16"),
    "llama3-8b-pp2-fsdp2": Plan(LLAMA, "8B", shard=2, pp=2, batch=4, tokens=4096),
    "llama3-8b-cp2-fsdp2": Plan(LLAMA, "8B", shard=2, cp=2),
    "llama3-8b-ddp4": Plan(LLAMA, "8B-8-layers", replicate=4),
    "llama3-70b-tp4": Plan(LLAMA_70B, "70B-6-layers", tp=4, dtype="bfloat16"),
    "deepseek-16b-ep4": Plan(DEEPSEEK, "16B", shard=4, ep=4, **MOE),
    "deepseek-16b-ep2-tp2-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tp=2, ep=2, etp=2, **MOE),
    "deepseek-16b-ep2-tp2-fsdp2-etp1": Plan(DEEPSEEK, "16B", shard=2, tp=2, ep=2, etp=1, **MOE),
    "deepseek-16b-ep4-tp2-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tp=2, ep=4, etp=1, **MOE),
    # A stage has two of the four GPUs, so expert parallelism has at most two, too.
    "deepseek-16b-ep2-pp2": Plan(DEEPSEEK, "16B-8-layers", shard=2, pp=2, ep=2, **MOE),
}
"""Without FSDP, torchtitan computes under TP and PP in the dtype of the parameters, so they are
bf16. With etp 1, it spreads the experts over the ranks of TP as well.
"""


def command(plan: Plan, recipe: str, steps: int, folder: Path) -> list[str]:
    """The call of train.sh for one run of a recipe, with or without IN_BF16 at its end.

    It trains TRACED steps more than `steps`.
    """
    recipe, in_bf16, _ = recipe.partition(IN_BF16)
    values = {
        "job.custom_config_module": "bench_plans_plugin",
        "job.dump_folder": str(folder),
        "quantize.linear.titan_fp8.recipe": recipe,
        "training.steps": steps + TRACED,
        # So low that no run has a burst of the gradient norm, and losses can be compared.
        "optimizer.lr": 5e-5,
        "lr_scheduler.warmup_steps": max(1, steps // 5),
        "training.dataset": "c4_test",
        "training.dataset_path": "./data/corpus/train",
        "model.hf_assets_path": "./data/tokenizer",
        "metrics.log_freq": max(1, steps // 6),
        "profiling.profile_freq": steps + TRACED,
        "profiling.save_traces_folder": "traces",
    }
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    switches = ["metrics.enable_tensorboard", "profiling.enable_profiling"]
    switches += ["checkpoint.no_enable", "validation.no_enable"]
    sections = ("linear", "grouped_mm") if plan.config == DEEPSEEK else ("linear",)
    switches += [f"quantize.{s}.titan_fp8.no_fsdp_all_gather" for s in sections if in_bf16]
    config = f"configs/{plan.config}.toml"
    return ["./scripts/train.sh", config, *plan.flags(), *flags, *[f"--{s}" for s in switches]]


def run(plan: Plan, recipe: str, steps: int, folder: Path) -> str | None:
    """Trains; returns None, or the last error of a run that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "NGPU": str(plan.gpus),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    log = folder / "train.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command(plan, recipe, steps, folder),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
    return None if done.returncode == 0 else last_error(log)


def last_error(log: Path) -> str:
    lines = COLOR.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1].strip()[-120:]


def step_of(trace: Path) -> int:
    return int(trace.parent.name.removeprefix("iteration_"))


def idle_share(gpu: list[dict], step: float) -> float:
    """The share of the shortest traced step in which no kernel runs.

    Args:
        gpu: events of several steps.
        step: about the length of a step in us. Kernels of the optimizer that are half of it apart
            belong to two steps.

    Raises:
        ValueError: the optimizer runs in fewer than two steps.
    """
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in gpu if "Adam" in e["name"])
    ends = [
        stop
        for (_, stop), following in zip(kernels, [*kernels[1:], None], strict=True)
        if following is None or following[0] - stop > step / 2
    ]
    if len(ends) < 2:
        raise ValueError(f"the optimizer runs in {len(ends)} steps of the trace, not in 2 or more")
    length, begin = min((end - begin, begin) for begin, end in itertools.pairwise(ends))
    clipped = [(max(begin, e["ts"]), min(begin + length, e["ts"] + e["dur"])) for e in gpu]
    working = busy([{"ts": a, "dur": b - a} for a, b in clipped if a < b])[0]
    return 1 - working / length


def row_of(
    name: str, recipe: str, steps: int, folder: Path, error: str | None, base: Row | None
) -> Row:
    """The row of a run of `steps` untraced steps. `base` is that of the plan's first run."""
    row: Row = {"plan": name, "GPUs": PLANS[name].gpus, "recipe": recipe}
    measured = ("tokens/s", "x bf16", "GiB", "idle %", "gathered GB", "loss", "gap %", "error")
    row |= dict.fromkeys(measured)
    if error is None:
        try:
            metrics = read_run(folder, recipe)
            losses = [v for step, v in metrics.series["loss"].items() if step <= steps][-5:]
            row |= {"tokens/s": metrics.tps(steps) or None, "GiB": metrics.peak_memory or None}
            row["loss"] = statistics.fmean(losses)
            traces = sorted(folder.glob("traces/iteration_*/rank0_trace.json*"), key=step_of)
            if traces:
                row["gathered GB"] = gathered_bytes(complete_events(traces[0])) / 1e9
            if traces and row["tokens/s"]:
                step = 1e6 * PLANS[name].tokens_of_gpu / row["tokens/s"]
                gpu = gpu_events(complete_events(traces[-1]))
                row["idle %"] = 100 * idle_share(gpu, step)
        except (InputError, OSError, EOFError, LookupError, TypeError, ValueError) as reason:
            error = f"unreadable results: {reason!r}"[:120]
    row["error"] = error
    if base and base["recipe"] == "bf16" and row["loss"] and base["loss"]:
        row["gap %"] = 100 * (row["loss"] / base["loss"] - 1)
        if row["tokens/s"] and base["tokens/s"]:
            row["x bf16"] = row["tokens/s"] / base["tokens/s"]
    return row


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_plans.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the plans and leave")
    parser.add_argument("--steps", type=int, default=30, help="of each run (default: 30)")
    parser.add_argument("--recipes", default="bf16,blockwise", help="default: bf16,blockwise")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.plans if name not in PLANS]:
        parser.error(f"no such plan: {', '.join(unknown)}; --list shows those there are")
    for recipe in args.recipes.split(","):
        if recipe.removesuffix(IN_BF16) not in RECIPE_NAMES or recipe == BF16 + IN_BF16:
            parser.error(
                f"--recipes: {recipe!r} is no recipe; allowed: {', '.join(RECIPE_NAMES)}, those in "
                f"FP8 also with {IN_BF16} at the end"
            )
    if args.steps < SPEED_FROM_STEP + 4:
        parser.error(f"--steps {args.steps}: at least {SPEED_FROM_STEP + 4}")
    gpus = os.environ.get("NGPU", "4")
    if not args.plans and not args.list:
        args.plans = [name for name, plan in PLANS.items() if str(plan.gpus) == gpus]
        if not args.plans:
            parser.error(f"NGPU={gpus}: there are plans for 1, 2 and 4 GPUs")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.list:
        for name, plan in PLANS.items():
            print(f"{name} ({plan.gpus} GPUs): configs/{plan.config}.toml", *plan.flags())
        return
    rows: list[Row] = []
    for name in args.plans:
        base = None
        for recipe in args.recipes.split(","):
            begin, folder = time.monotonic(), RESULTS / name / f"{recipe}-{time.time_ns()}"
            print(f"== {name}, {recipe}", flush=True)
            error = run(PLANS[name], recipe, args.steps, folder)
            row = row_of(name, recipe, args.steps, folder, error, base)
            base = base or row
            rows.append(row)
            result = row["error"] or f"{row['tokens/s']} tokens/s"
            print(f"   {time.monotonic() - begin:.0f} s: {result}", flush=True)
    speed = f"per GPU, median of steps {SPEED_FROM_STEP} to {args.steps}"
    facts = {"steps": args.steps, "tokens/s": speed}
    RESULTS.mkdir(parents=True, exist_ok=True)
    bench_common.report(rows, RESULTS / "result.json", "Parallel plans", ABOUT, **facts)
    raise SystemExit(any(row["error"] for row in rows))


if __name__ == "__main__":
    # Or Python would kill torchrun, which could not end its ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
