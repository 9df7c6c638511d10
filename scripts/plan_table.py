"""Writes the tables of `titan_fp8.plan` from measurements.

    python scripts/plan_table.py [--check]

One table for each GPU of which there are measurements: the results of bench_gemm.py in
docs/benchmarks/, and in docs/benchmarks/plan/ those of measure_plan.py and the runs (runs_*.json)
from which the parts of a step are derived that no benchmark of kernels measures. With --check it
writes nothing and fails if a table is out of date.

Runs have been profiled on one GPU only. For the others, times of kernels that the bandwidth limits
(SCALED) are scaled by the bandwidth of copies. Collectives, over the same NVLink, are taken to be
as fast, and the CPU as well (TAKEN). ESTIMATED entries were not measured alone, or not for each
recipe: most are chosen so that the plan predicts the speed of runs. "sources" in a table says for
each of its entries where it comes from, and the plan prints what was not measured on its card.

CPU times of compiled FP8 linears were measured on both machines before connected FP8 ops became one
call, and are corrected for that (`add_connected`). Drop this once they have been measured again.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
INPUTS = ROOT / "docs" / "benchmarks"
TABLES = ROOT / "titan_fp8" / "plan" / "tables"
RUNS = "plan/runs_h200.json"
KINDS = {
    **{"fprop": "mm", "dgrad": "mm", "wgrad": "wgrad"},
    **{"M-grouped": "mm", "K-grouped": "wgrad"},
}
RECIPES = ("blockwise", "rowwise")
SCALED = ("dense_ps", "moe_ps", "optimizer_ps.float32", "reduce_ps", "whole_ps", "shard_ps")
TAKEN = (
    # With bf16 parameters it moves 20 bytes in 7.2 ps, two thirds of the bandwidth of copies.
    "optimizer_ps.bfloat16",
    "link_gbps",
    *("host.block_us", "host.fsdp_block_us", "host.several_ranks"),
)
ESTIMATED = ("exposed", "host.moe_block_us", "host.moe_tp_block_us", "host.fsdp_all_gather")


def gpu_of(result: dict) -> str:
    """The name of a table: "h200" for "NVIDIA H200"."""
    found = re.search(r"\b[HBA]\d{2,3}\b", result["card"])
    if found is None:
        raise ValueError(
            f"card {result['card']!r}: allowed are names with a word such as H200, B200 or A100"
        )
    return found[0].lower()


def table_of(result: dict, made: dict[str, dict]) -> dict:
    """The table of the result's card, made if there is none; ValueError if it is another card's."""
    gpu = gpu_of(result)
    table = made.setdefault(gpu, {"gpu": result["card"], "sources": {}, "gemm": []})
    if table["gpu"] != result["card"]:
        raise ValueError(
            f"results of {table['gpu']!r} and {result['card']!r} would share the table {gpu}.json"
        )
    return table


def gemm_rows(result: dict) -> list[list]:
    """(family, op, groups, m, n, k, us) of a result of bench_gemm.py.

    Groups end at multiples of 128 for blockwise GEMMs, and anywhere for rowwise ones, for which
    torchtitan pads groups to multiples of 16.
    """
    rows = []
    for row in result["rows"]:
        op, _, kind = row["op"].partition(" ")
        grouped = op.endswith("grouped")
        shape = [row["E"] if grouped else 0, row["M"], row["N"], row["K"]]
        if kind == "rowwise any ends":
            rows.append(["rowwise", KINDS[op], *shape, row["us"]])
        elif not kind:
            rows.append(["blockwise", KINDS[op], *shape, row["us"]])
            rows.append(["bf16", KINDS[op], *shape, row["us"] * row["x bf16"]])
            if not grouped:
                rows.append(["rowwise", KINDS[op], *shape, row["us"] * row["x rowwise"]])
    return rows


def source(name: str, result: dict) -> str:
    return f"docs/benchmarks/{name}: {result['commit']}, {result['date']}"


def rates(runs: dict, copy_gbps: float) -> dict:
    """Rates of the parts of a step, from the profiles of runs on a card with this bandwidth."""
    dense, moe, fsdp, fp8 = (runs[k] for k in ("dense", "moe", "fsdp", "fsdp_all_gather"))
    link = runs["link"]
    dense_ps = dense["elementwise"] * 1e9 / (dense["tokens"] * dense["dim"] * dense["blocks"])
    # The MoE run repeats forward, a third of the elementwise work, in backward.
    repeated = 4 / 3
    dense_part = dense_ps * repeated * moe["tokens"] * moe["dim"] * moe["blocks"] / 1e9
    reduce_ps = fsdp["reduce_copies"] * 1e9 / fsdp["parameters"]
    moe_ps, whole_ps = {}, {}
    sharded, routed = moe["sharded_parameters"], moe["rows"] * moe["dim"] * moe["moe_blocks"]
    for way, kind, gathered, sent in (("host", "bf16", 2, 4), ("gather", "fp8", 1, 2)):
        run = moe[way]
        # In FP8 the SwiGLU kernels are apart; in bf16 they move 6 bytes in forward, 10 in backward.
        swiglu = run["fused_swiglu"] * (2 * 6 + 10) / copy_gbps / 1e6
        others = run["elementwise"] + swiglu - dense_part
        moe_ps[way] = others / repeated * 1e9 / routed
        # FSDP2 gathers the other weights twice, from two ranks, and reduces to FP32.
        copies = sharded * 2 * (gathered + 2 * gathered) / copy_gbps / 1e6
        copies += sharded * reduce_ps * (2 + sent) / 6 / 1e9
        whole_ps[kind] = (run["fsdp_copies"] - copies) * 1e9 / moe["whole_parameters"]
    # Half of the rows leave the rank: twice in forward and twice in backward.
    received = 4 * routed * 2 / 2
    received += sharded * (2 * 2 + 4) / 2
    return {
        "dense_ps": dense_ps,
        "moe_ps": moe_ps,
        "optimizer_ps": {
            "bfloat16": dense["optimizer"] * 1e9 / dense["parameters"],
            "float32": fsdp["optimizer"] * 1e9 * fsdp["ranks"] / fsdp["parameters"],
        },
        "reduce_ps": reduce_ps,
        "whole_ps": whole_ps,
        "shard_ps": {each: fp8[each]["shards"] * 1e9 / fp8["shard_elements"] for each in RECIPES},
        "link_gbps": received / link["nccl"] / 1e6,
        "exposed": {each: runs["exposed"][each] for each in ("bf16", "fp8")},
        "host": {
            **{each: us for each, us in runs["host"].items() if each != "source"},
            "fsdp_all_gather": {each: fp8[each]["cpu"] * 1e3 / fp8["weights"] for each in RECIPES},
        },
    }


def rounded(value: object) -> object:
    """Floats to four digits, so that a table stays small."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tables(folder: Path) -> dict[str, dict]:
    """The table of each GPU, from the measurements in `folder`."""
    runs = json.loads((folder / RUNS).read_text(encoding="utf-8"))
    made: dict[str, dict] = {}
    for file in sorted(folder.glob("gemm*.json")) + sorted(folder.glob("plan/measure_*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        table = table_of(result, made)
        # Of measure_plan.py, or of bench_gemm.py.
        entries = dict(result.get("measured") or {"gemm": gemm_rows(result)})
        table["gemm"] += entries.pop("gemm")
        for entry in ("gemm", *entries):
            own = table["sources"].setdefault(entry, {"how": "measured", "from": []})
            own["from"].append(source(str(file.relative_to(folder)), result))
        table |= entries
    own = table_of(runs, made)
    for table in made.values():
        if "host" not in table:
            raise ValueError(f"{table['gpu']}: measure it with scripts/measure_plan.py, too")
        add_rates(table, runs, own["copy_gbps"])
    return {gpu: rounded(table) for gpu, table in made.items()}


def add_rates(table: dict, runs: dict, copy_gbps: float) -> None:
    """Adds what was measured in the runs, on a card with this bandwidth of copies."""
    here = table["gpu"] == runs["card"]
    slower = copy_gbps / table["copy_gbps"]
    derived = rates(runs, copy_gbps)
    add_connected(table["host"]["linear, compiled"], runs["connected"])
    table["sources"]["host"]["from"].append(f"docs/benchmarks/{RUNS}: connected")
    for entry in SCALED:
        name, _, key = entry.partition(".")
        value = derived[name]
        if isinstance(value, dict):
            factors = {each: slower if key in ("", each) else 1 for each in value}
            derived[name] = {each: ps * factors[each] for each, ps in value.items()}
        else:
            derived[name] = value * slower
    for entry in (*SCALED, *TAKEN, *ESTIMATED):
        elsewhere = "scaled" if entry in SCALED else "taken"
        how = "estimated" if entry in ESTIMATED else "measured" if here else elsewhere
        files = [f"docs/benchmarks/{RUNS}"]
        table["sources"][entry] = {"how": how, "card": runs["card"], "from": files}
    table |= derived | {"host": table["host"] | derived["host"]}


def add_connected(linear: dict[str, float], block: dict) -> None:
    """Changes what a compiled FP8 linear costs the CPU to what it costs with connected ops.

    What it costs more than one in bf16 falls by the same factor as that of a block.
    """
    for recipe in RECIPES:
        left = (block[recipe] - block["bf16"]) / (block["apart"][recipe] - block["bf16"])
        linear[recipe] = linear["bf16"] + left * (linear[recipe] - linear["bf16"])


def text_of(table: dict) -> str:
    """JSON with a line for each row of a list."""
    lines = []
    for key, value in table.items():
        if key == "gemm":
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f' "gemm": [\n  {rows}\n ]')
        elif key in ("sources", "quantize", "host"):
            rows = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f' "{key}": {{\n  {rows}\n }}')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a table is out of date")
    args = parser.parse_args(argv)
    stale = []
    for gpu, table in tables(INPUTS).items():
        file, text = TABLES / f"{gpu}.json", text_of(table)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
        if not args.check:
            file.write_text(text, encoding="utf-8")
    if args.check and stale:
        print(f"{', '.join(stale)} out of date: run scripts/plan_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
