"""Writes the tables of `titan_fp8.plan` from measurements.

    python scripts/plan_table.py [--check]

One table for each GPU of which there are measurements: the results of bench_gemm.py in
docs/benchmarks/, and in docs/benchmarks/plan/ those of bench_quantize.py and measure_plan.py and
the runs (runs_*.json) from which the parts of a step are derived that no benchmark of kernels
measures. With --check it writes nothing and fails if a table is out of date.

Runs have been profiled on one GPU only. Of the others, the times of elementwise kernels and of the
optimizer follow the bandwidth of their copies; collectives, over the same NVLink, are as fast.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
INPUTS = ROOT / "docs" / "benchmarks"
TABLES = ROOT / "titan_fp8" / "plan" / "tables"
RUNS = "plan/runs_h200.json"
KINDS = {
    **{"fprop": "mm", "dgrad": "mm", "wgrad": "wgrad"},
    **{"M-grouped": "mm", "K-grouped": "wgrad"},
}


def gpu_of(result: dict) -> str:
    """The name of a table: "h200" for "NVIDIA H200"."""
    return re.findall(r"[HBA]\d+", result["card"])[0].lower()


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


def quantise_rows(result: dict) -> dict[str, list[list[float]]]:
    """{op: [elements, us]} of a result of bench_quantize.py; the mean of shapes of one size."""
    times = defaultdict(lambda: defaultdict(list))
    for row in result["rows"]:
        elements = 1
        for size in row["shape"].split("x"):
            elements *= int(size)
        times[row["op"]][elements].append(row["us"])
    return {
        op: [[n, sum(us) / len(us)] for n, us in sorted(sizes.items())]
        for op, sizes in sorted(times.items())
    }


def source(name: str, result: dict) -> str:
    return f"docs/benchmarks/{name}: {result['commit']}, {result['date']}"


def copy_gbps(result: dict) -> float:
    return float(result["facts"]["copy bandwidth"].split()[0])


def rates(runs: dict) -> dict:
    """Rates of the parts of a step, from the profiles of runs."""
    dense, moe, wide = runs["dense"], runs["moe"], runs["optimizer_fp32"]
    flop = 3.5 * 1e-9  # backward takes 2.5 times the FLOP of forward; ms to TFLOPS
    attention = [flop * run["attention_flop"] / run["attention"] for run in (dense, moe)]
    dense_ps = dense["elementwise"] * 1e9 / (dense["tokens"] * dense["dim"] * dense["blocks"])
    # The MoE run repeats forward, a third of the elementwise work, in backward.
    repeated = 4 / 3
    dense_part = dense_ps * repeated * moe["tokens"] * moe["dim"] * moe["blocks"] / 1e9
    moe_ps = {}
    for way in ("host", "gather"):
        run = moe[way]
        known = run["linears"] + run["grouped"] + run["optimizer"] + moe["attention"] + dense_part
        elements = moe["rows"] * moe["dim"] * moe["moe_blocks"]
        moe_ps[way] = (run["all but NCCL"] - known) / repeated * 1e9 / elements
    # Half of the rows leave the rank: twice in forward and twice in backward.
    received = 4 * moe["rows"] * moe["dim"] * moe["moe_blocks"] * 2 / 2
    return {
        "attention_tflops": sum(attention) / len(attention),
        "dense_ps": dense_ps,
        "moe_ps": moe_ps,
        "optimizer_ps": {
            "bfloat16": dense["optimizer"] * 1e9 / dense["parameters"],
            "float32": wide["optimizer"] * 1e9 / wide["parameters"],
        },
        "link_gbps": received / moe["nccl"] / 1e6,
        "exposed": runs["fsdp"]["exposed"],
        "host": {key: value for key, value in runs["host"].items() if key != "source"},
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
    files = sorted(folder.glob("gemm*.json")) + sorted((folder / "plan").glob("*.json"))
    results = {str(f.relative_to(folder)): json.loads(f.read_text("utf-8")) for f in files}
    runs = results.pop(RUNS)
    made: dict[str, dict] = {}
    for name, result in results.items():
        table = made.setdefault(
            gpu_of(result), {"gpu": result["card"], "sources": [], "gemm": [], "quantise": {}}
        )
        table["sources"].append(source(name, result))
        if "measured" in result:  # by measure_plan.py
            measured = dict(result["measured"])
            table["gemm"] += measured.pop("gemm")
            # Its sizes are more than those of bench_quantize.py, which may be older.
            table["quantise"] = measured.pop("quantise")
            table.setdefault("own", {}).update(measured)
        elif "quantize" in name:
            table["quantise"] = table["quantise"] or quantise_rows(result)
            table.setdefault("copy_gbps", copy_gbps(result))
        else:
            table["gemm"] += gemm_rows(result)
    of_runs = made[gpu_of(runs)]
    for table in made.values():
        own = table.pop("own", {})
        table["sources"].append(f"docs/benchmarks/{RUNS}")
        derived = rates(runs)
        table["copy_gbps"] = own.pop("copy_gbps", table.get("copy_gbps"))
        if table is not of_runs:
            slower = of_runs["copy_gbps"] / table["copy_gbps"]
            derived["dense_ps"] *= slower
            derived["moe_ps"] = {way: ps * slower for way, ps in derived["moe_ps"].items()}
            derived["attention_tflops"] = own["attention_tflops"]
            derived["optimizer_ps"] = {
                dtype: ps * slower for dtype, ps in derived["optimizer_ps"].items()
            }
        derived["host"] |= own.get("host", {})
        table |= derived
    return {gpu: rounded(table) for gpu, table in made.items()}


def text_of(table: dict) -> str:
    """JSON with a line for each row of a list."""
    lines = []
    for key, value in table.items():
        if key == "gemm":
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f' "gemm": [\n  {rows}\n ]')
        elif key in ("quantise", "host"):
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
