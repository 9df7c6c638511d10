"""Trains production models under many parallel plans, in bf16 and in FP8, and prints one table.

    python scripts/bench plans [--steps N] [--repeats N] [--recipes "bf16,bf16 tuned,blockwise"]
        [PLAN ...]

Without a PLAN it runs all that use as many GPUs as there are (CUDA_VISIBLE_DEVICES counts): 1, 2 or
4. Every run is compiled and has op-level activation checkpointing. "+cuda_graph" and
"+exchange_fp8" may follow a recipe and "bf16 tuned". Results are in outputs/bench_plans: a folder
for each run, and result.json for release.py. A run that fails is reported in the table, the others
go on, and the exit status is 1.

"torchao tensorwise" and "torchao rowwise" are stock torchtitan with torchao 0.17 on PYTHONPATH.
Linears take torchtitan's converter, tensorwise with FP8 gathers; that of experts does not work with
0.17, so experts take torchao's rowwise products as in scripts/converge/arms.py.

`titan_fp8/plan/train.py` runs the jobs, as for `python -m titan_fp8.plan --train`. "compute %" is
the share of a step in which rank 0 computes, from one traced step more.
"""

import argparse
import importlib.metadata
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from bench import common
from tables import Row

from titan_fp8.modules.linear import DEFAULT_FILTER_FQNS
from titan_fp8.plan import train
from titan_fp8.recipe import BF16, RECIPE_NAMES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "outputs" / "bench_plans"
OPTIONS = {
    "cuda_graph": f"--{train.LINEAR}.cuda_graph",
    "exchange_fp8": f"--{train.GROUPED_MM}.exchange=fp8",
}
FLOAT8 = "--quantize.linear.float8"
TORCHAO = {
    "torchao tensorwise": [
        f"{FLOAT8}.enable_fsdp_float8_all_gather",
        f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
    ],
    "torchao rowwise": [f"{FLOAT8}.recipe_name", "rowwise"],
}
ARMS = (*RECIPE_NAMES, train.TUNED, *TORCHAO)
ABOUT = "Every run is compiled and has op-level activation checkpointing."


@dataclass(frozen=True)
class Plan:
    """A model under one parallel plan; degrees as in torchtitan's [parallelism].

    `model` is its name if it is not that of the config, whose other settings it takes. `blocks` is
    the number of its blocks, as a plan must fit on few GPUs; 0: all.
    """

    config: str
    flavor: str
    blocks: int = 0
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
    balanced: bool = False
    model: str = ""

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tp * self.cp * self.pp

    @property
    def batch_of_all(self) -> int:
        return self.batch * self.micro_batches * self.replicate * self.shard


LLAMA, LLAMA_70B, DEEPSEEK = "llama3_8b", "llama3_70b", "deepseek_v3_16b"
MOE = {"batch": 4, "tokens": 4096, "balanced": True}
QWEN = {**MOE, "batch": 2, "model": "qwen3"}
PLANS = {
    "llama3-8b": Plan(LLAMA, "8B", dtype="bfloat16"),
    "llama3-8b-fsdp2": Plan(LLAMA, "8B", shard=2),
    "llama3-8b-fsdp2-2048": Plan(LLAMA, "8B", shard=2, tokens=2048),
    "llama3-8b-fsdp2-2048x4": Plan(LLAMA, "8B", shard=2, tokens=2048, micro_batches=4),
    "llama3-8b-tp2": Plan(LLAMA, "8B", tp=2, dtype="bfloat16"),
    "llama3-70b-tp2": Plan(LLAMA_70B, "70B", 6, tp=2, dtype="bfloat16"),
    # 16 billion parameters in FP32 with the optimizer's states do not fit on two GPUs.
    "deepseek-16b-ep2": Plan(DEEPSEEK, "16B", shard=2, ep=2, dtype="bfloat16", **MOE),
    "deepseek-16b-ep2-6": Plan(DEEPSEEK, "16B", 6, shard=2, ep=2, dtype="bfloat16", **MOE),
    "qwen3-30b-ep2": Plan(DEEPSEEK, "30B-A3B", 12, shard=2, ep=2, dtype="bfloat16", **QWEN),
    "deepseek-16b-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tokens=4096, dtype="bfloat16"),
    "llama3-8b-fsdp4": Plan(LLAMA, "8B", shard=4),
    "llama3-8b-fsdp4-2048": Plan(LLAMA, "8B", shard=4, tokens=2048),
    "llama3-8b-hsdp2x2": Plan(LLAMA, "8B", replicate=2, shard=2),
    "llama3-8b-tp2-fsdp2": Plan(LLAMA, "8B", shard=2, tp=2),
    "llama3-8b-tp4": Plan(LLAMA, "8B", tp=4, dtype="bfloat16"),
    "llama3-8b-pp2-fsdp2": Plan(LLAMA, "8B", shard=2, pp=2, batch=4, tokens=4096),
    "llama3-8b-cp2-fsdp2": Plan(LLAMA, "8B", shard=2, cp=2),
    "llama3-8b-ddp4": Plan(LLAMA, "8B", 8, replicate=4),
    "llama3-70b-tp4": Plan(LLAMA_70B, "70B", 6, tp=4, dtype="bfloat16"),
    "deepseek-16b-ep4": Plan(DEEPSEEK, "16B", shard=4, ep=4, **MOE),
    "deepseek-16b-ep4-bf16": Plan(DEEPSEEK, "16B", shard=4, ep=4, dtype="bfloat16", **MOE),
    "qwen3-30b-ep4": Plan(DEEPSEEK, "30B-A3B", 24, shard=4, ep=4, dtype="bfloat16", **QWEN),
    "deepseek-16b-ep2-tp2-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tp=2, ep=2, etp=2, **MOE),
    "deepseek-16b-ep4-tp2-fsdp2": Plan(DEEPSEEK, "16B", shard=2, tp=2, ep=4, etp=1, **MOE),
    "deepseek-16b-ep2-pp2": Plan(DEEPSEEK, "16B", 8, shard=2, pp=2, ep=2, **MOE),
}
"""Without FSDP, torchtitan computes under TP and PP in the dtype of the parameters, so they are
bf16. With etp 1, it spreads the experts over the ranks of TP as well.
"""


def config_of(plan: Plan, arm: str, folder: Path) -> str:
    """The TOML of a run. That of torchao does not load titan_fp8; it is written to the folder."""
    config = f"configs/{plan.config}.toml"
    if arm not in TORCHAO:
        return config
    ours = r"^custom_config_module.*?\n|^\[quantize\..*?(?=^\[|\Z)"
    text = re.sub(ours, "", (ROOT / config).read_text(), flags=re.MULTILINE | re.DOTALL)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(text)
    return str(folder / "job.toml")


def flags_of(plan: Plan, arm: str, steps: int) -> list[str]:
    """torchtitan's flags for one run of an arm, which OPTIONS may follow."""
    arm, *options = arm.split("+")
    values = {
        "model.flavor": plan.flavor,
        "model.hf_assets_path": "./data/tokenizer",
        "parallelism.data_parallel_replicate_degree": plan.replicate,
        "parallelism.data_parallel_shard_degree": plan.shard,
        "parallelism.tensor_parallel_degree": plan.tp,
        "parallelism.context_parallel_degree": plan.cp,
        "parallelism.pipeline_parallel_degree": plan.pp,
        "parallelism.expert_parallel_degree": plan.ep,
        "parallelism.expert_tensor_parallel_degree": plan.etp,
        "training.local_batch_size": plan.batch,
        "training.global_batch_size": plan.batch_of_all,
        "training.seq_len": plan.tokens,
        "training.dtype": plan.dtype,
        "training.dataset": "c4_test",
        "training.dataset_path": "./data/corpus/train",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        # So low that no run has a burst of the gradient norm, and losses can be compared.
        "optimizer.lr": 5e-5,
        "lr_scheduler.warmup_steps": max(1, steps // 5),
    }
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    flags += ["--compile.enable", *["--debug.moe_force_load_balance"] * plan.balanced]
    flags += ["--model.name", plan.model] if plan.model else []
    experts = plan.config == DEEPSEEK
    if arm in TORCHAO:
        converters = "quantize.linear.float8" + ",converge.torchao_experts" * experts
        flags += ["--model.converters", converters, *TORCHAO[arm]]
        flags += [f"{FLOAT8}.filter_fqns", ",".join(DEFAULT_FILTER_FQNS)]
        flags += ["--quantize.grouped_mm.float8.fqns", "experts"] * experts
        flags += ["--experimental.custom_import", "scripts.converge.arms"] * experts
        return flags
    flags += [OPTIONS[option] for option in options]
    return [*flags, *train.arm_flags(arm, (train.LINEAR, train.GROUPED_MM)[: 1 + experts])]


def row_of(name: str, recipe: str, result: train.Row | str, base: Row | None) -> Row:
    """The row of a run, or of its error. `base` is that of the plan's first run."""
    row: Row = {"plan": name, "GPUs": PLANS[name].gpus, "recipe": recipe}
    row |= dict.fromkeys(("tokens/s", "x bf16", "GiB", "compute %", "loss", "gap %", "error"))
    if isinstance(result, str):
        return row | {"error": result}
    row |= {key: result[key] for key in ("tokens/s", "GiB", "loss")}
    row["compute %"] = 100 * result["compute"]
    if base and base["recipe"] == "bf16" and base["loss"]:
        row["gap %"] = 100 * (row["loss"] / base["loss"] - 1)
        row["x bf16"] = row["tokens/s"] / base["tokens/s"]
    return row


def parse(argv: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    texts = "python scripts/bench plans", None, __doc__, f"PLAN: {', '.join(PLANS)}"
    parser = argparse.ArgumentParser(*texts, formatter_class=raw)
    parser.add_argument("plans", nargs="*", metavar="PLAN")
    parser.add_argument("--steps", type=int, default=30, help="of each run (default: 30)")
    repeats = "of all recipes, in turn (default: 1)"
    parser.add_argument("--repeats", type=int, default=1, choices=range(1, 10), help=repeats)
    arms = f"{BF16},{train.TUNED},blockwise"
    parser.add_argument("--recipes", default=arms, help=f"default: {arms}")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.plans if name not in PLANS]:
        parser.error(f"no such plan: {', '.join(unknown)}; there are {', '.join(PLANS)}")
    for recipe in args.recipes.split(","):
        arm, *options = recipe.split("+")
        if arm not in ARMS or options and (arm in (BF16, *TORCHAO) or {*options} - OPTIONS.keys()):
            allowed = f"{', '.join(ARMS)}; +{', +'.join(OPTIONS)} after a recipe or {train.TUNED!r}"
            parser.error(f"--recipes: {recipe!r} is no recipe; allowed: {allowed}")
        if recipe in TORCHAO and not common.HAS_TORCHAO:
            parser.error(f"--recipes: {recipe!r} needs torchao 0.17 on PYTHONPATH")
    if args.steps % train.LOG_EVERY or args.steps <= train.WARM_UP:
        low = train.WARM_UP + train.LOG_EVERY
        parser.error(f"--steps {args.steps}: multiples of {train.LOG_EVERY}, at least {low}")
    gpus = torch.cuda.device_count()
    args.plans = args.plans or [name for name, plan in PLANS.items() if plan.gpus == gpus]
    if not args.plans:
        parser.error(f"there are {gpus} GPUs: name a PLAN, as there are plans for 1, 2 and 4 GPUs")
    if large := [name for name in args.plans if PLANS[name].gpus > gpus]:
        parser.error(f"{', '.join(large)}: more GPUs than the {gpus} there are")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    os.chdir(ROOT)
    if not Path("data/stamp").exists():
        import prepare_data

        prepare_data.main(["data"])
    rows: list[Row] = []
    for name in args.plans:
        base = None
        for recipe in args.recipes.split(",") * args.repeats:
            begin, folder = time.monotonic(), RESULTS / name / f"{recipe}-{time.time_ns()}"
            print(f"== {name}, {recipe}", flush=True)
            plan, flags = PLANS[name], flags_of(PLANS[name], recipe, args.steps)
            try:
                config = config_of(plan, recipe, folder)
                args_of_run = config, flags, plan.gpus, plan.blocks, args.steps, folder
                row = row_of(name, recipe, train.run(*args_of_run), base)
            except RuntimeError as error:
                row = row_of(name, recipe, str(error), base)
            base = base or row
            rows.append(row)
            result = row["error"] or f"{row['tokens/s']} tokens/s"
            print(f"   {time.monotonic() - begin:.0f} s: {result}", flush=True)
    speed = f"per GPU, median of steps {train.WARM_UP + 1} to {args.steps}"
    facts = {"steps": args.steps, "tokens/s": speed}
    if common.HAS_TORCHAO:
        facts["torchao"] = importlib.metadata.version("torchao")
    RESULTS.mkdir(parents=True, exist_ok=True)
    common.report(rows, RESULTS / "result.json", "Parallel plans", ABOUT, **facts)
    return any(row["error"] for row in rows)
