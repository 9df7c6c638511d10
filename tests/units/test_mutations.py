"""Every likely fault of the numerics, put into the reference: the named check has to notice it.

A mutation takes a function of `reference.py` or `layouts.py` and returns a faulty one. The ops look
these functions up by name when they are called, and the functions look up each other in the same
way, so it is enough to replace the attributes of both modules.
`test_checks_pass_without_a_mutation` is the control.

blockwise_pow2 and rowwise_with_gw_hp run the functions of blockwise and rowwise, so only faults of
what is theirs alone are put into them.
"""

import functools
import itertools
from collections.abc import Callable

import numerics as checks
import oracle
import pytest
import torch
from numerics import GEMMS, NAN

from titan_fp8 import layouts, reference
from titan_fp8.ops.operands import Check

M, N, K = 200, 272, 400
ENDS = [60, 60, 190]
E4M3 = torch.float8_e4m3fn


dense_case = functools.cache(lambda: checks.dense_case(M, N, K))
grouped_case = functools.cache(lambda: checks.grouped_case(M, ENDS, N, K))


@functools.cache
def _expected(recipe: str, grouped: bool) -> dict[str, oracle.Product]:
    """What no mutation changes, since the oracle uses nothing of titan_fp8."""
    x, w, g = map(oracle.array, grouped_case() if grouped else dense_case())
    return oracle.layer(x, w, g, recipe, *([ENDS] if grouped else []))


def _layer(x, w, g, recipe: str, offs=None) -> dict[str, oracle.Product]:
    return _expected(recipe, offs is not None)


def _products(recipe: str, gemm: str) -> None:
    checks.check_linear(recipe, *dense_case(), gemms=(gemm,), layer=_layer)


def _grouped(recipe: str, gemm: str) -> None:
    checks.check_grouped(recipe, *grouped_case(), ENDS, gemms=(gemm,), layer=_layer)


def _columns(recipe: str, _: str) -> None:
    x = checks.awkward(M, 144, torch.float32)
    x[150] = NAN
    checks.check_columns(recipe, x)
    checks.check_columns(recipe, x, ENDS)


def _non_finite(recipe: str, gemm: str) -> None:
    for spot in checks.SPOILT[recipe]:
        for value in (NAN, checks.INF):
            checks.check_non_finite(recipe, spot, value, gemms=(gemm,))


CHECKS: dict[str, Callable[[str, str], None]] = {
    "linear": _products,
    "grouped": _grouped,
    "non-finite": _non_finite,
    "autocast": lambda recipe, _: checks.check_autocast(recipe, torch.float32, torch.float32),
    "rows": lambda recipe, _: checks.check_rows(recipe, checks.awkward(9, 144, torch.float32)),
    "columns": _columns,
    "weight": lambda recipe, _: checks.check_weight(recipe, checks.patchwork(272, 400)),
    "every value": lambda recipe, _: checks.check_every_value(recipe),
    "reciprocal": lambda recipe, _: checks.check_reciprocal(recipe),
}
PRODUCTS = ("linear", "grouped")


# Faults of one operand: of a quantizer, which returns q and s


def doubled_scale(quantize):
    def faulty(*args, **options):
        q, s = quantize(*args, **options)
        s[(0,) * s.dim()] *= 2
        return q, s

    return faulty


def swapped_scale_axis(quantize):
    """1x128 and 128x128 scales, read along the other dimension."""

    def faulty(*args, **options):
        q, s = quantize(*args, **options)
        return q, s.mT.reshape(s.shape)

    return faulty


def scale_of_the_next_row(quantize):
    def faulty(*args, **options):
        q, s = quantize(*args, **options)
        return q, s.roll(1, -1)

    return faulty


def dropped_tail(dim: int):
    """What stands behind the last whole 128 of the contracted dimension counts as zeros."""

    def mutate(f):
        def faulty(x, *args, **options):
            x, whole = x.clone(), x.shape[dim] // 128 * 128
            x.narrow(dim, whole, x.shape[dim] - whole).zero_()
            return f(x, *args, **options)

        return faulty

    return mutate


def not_transposed(quantize_t):
    def faulty(w, **options):
        q, s = quantize_t(w, **options)
        return q.mT.contiguous().view(q.shape), s

    return faulty


def blocks_across_groups(quantize_128x1_t):
    """Blocks of 128 tokens counted from the first token, not from each group's first."""

    def faulty(x, offs=None, aligned=False, **options):
        rounded = reference.dequantize_1x128(*quantize_128x1_t(x.float().nan_to_num()))
        return quantize_128x1_t(rounded.t()[: len(x)], offs, aligned, **options)

    return faulty


def one_scale_for_all_groups(quantize_col_t):
    def faulty(x, offs=None, aligned=False):
        if offs is None:
            return quantize_col_t(x)
        padded, _ = layouts.pad_groups(x.float(), offs, aligned, layouts.ROW_ALIGNMENT)
        q, s = reference.quantize_row(padded.t().contiguous())
        return q, s.expand(len(offs), -1).contiguous()

    return faulty


# Faults of a GEMM


def rounded_twice(gemm):
    return lambda *args: gemm(*args[:-1], torch.bfloat16).to(args[-1])


def argument_of_the_next_group(index: int, dim: int = 0):
    def mutate(gemm):
        def faulty(*args):
            args = list(args)
            # FP8 does not roll.
            args[index] = args[index].float().roll(1, dim)
            return gemm(*args)

        return faulty

    return mutate


def bf16_dequantized(dequantize):
    return lambda q, s: dequantize(q, s).bfloat16().float()


def rows_past_the_end_written(gemm):
    def faulty(a, sa, b, sb, offs, *args):
        y = gemm(a, sa, b, sb, offs, *args)
        y[offs[-1] :] = 1
        return y

    return faulty


def last_group_to_the_end(group_bounds):
    def faulty(offs, m):
        starts, ends = group_bounds(offs, m)
        return starts, torch.cat([ends[:-1], torch.full_like(ends[-1:], m)])

    return faulty


def ends_off_by_one(group_bounds):
    return lambda offs, m: group_bounds(offs - (offs > 0).int(), m)


# Faults of the arithmetic


def always(value):
    """Puts a fixed function in place of any."""
    return lambda *_: value


def truncated(_):
    def cast(x, s):
        exact = x * (1 / s)
        q = exact.to(E4M3)
        return (q.view(torch.uint8) - (q.float().abs() > exact.abs()).byte()).view(E4M3)

    return cast


def nan_swallowed(f):
    return lambda x, *args: f(x.nan_to_num(), *args)


def power_of_two(scale_of):
    return lambda amax, *_: torch.exp2(torch.ceil(torch.log2(scale_of(amax))))


def not_a_power_of_two(scale_of):
    return lambda amax, *_: scale_of(amax)


NO_QUANTIZATION = {
    "scale_of": always(lambda amax, *_: torch.ones_like(amax)),
    "cast": always(lambda x, s: x * s),
    "zero_padding": always(lambda q, *_: q),
}


class _ReciprocalOfAmax:
    """r = 448 / amax, which is not 1 / s when s has been rounded."""

    def scale_of(self, scale_of):
        def faulty(amax, *args):
            self.amax = amax
            return scale_of(amax, *args)

        return faulty

    def cast(self, _):
        return lambda x, s: (x * (448 / self.amax.view(s.shape))).to(E4M3)


_reciprocal = _ReciprocalOfAmax()

# The table


OPERANDS = {
    "blockwise": {
        "fprop": {"quantize_1x128": -1, "quantize_128x128": -1},
        "dgrad": {"quantize_1x128": -1, "quantize_128x128_t": -2},
        "wgrad": {"quantize_128x1_t": 0},
    },
    "rowwise": {
        "fprop": {"quantize_row": -1},
        "dgrad": {"quantize_row": -1, "quantize_weight_col_t": -2},
        "wgrad": {"quantize_col_t": 0},
    },
}
"""The quantizers of each GEMM's operands, and the dimension of theirs that is contracted."""
OPERANDS["rowwise_with_gw_hp"] = {"wgrad": {"bf16_wgrad": 0}}

GEMM_FUNCTIONS = {
    kind: {"fprop": f"{kind}_mm", "dgrad": f"{kind}_mm", "wgrad": f"{kind}_wgrad"}
    for kind in ("blockwise", "rowwise")
}
GEMM_FUNCTIONS["rowwise_with_gw_hp"] = {"wgrad": "bf16_wgrad"}


def mutations() -> list:
    """(name, faults by function of the reference, recipe, gemm, check)."""
    table = []

    def add(name, faults, recipe, gemm, *names):
        for check in names:
            label = f"{name}, {'/'.join(faults)}: {recipe} {gemm}, {check}"
            table.append(pytest.param(faults, recipe, gemm, check, id=label))

    for gemm in GEMMS:
        exact = {"scale_of": not_a_power_of_two}
        add("scale not a power of two", exact, "blockwise_pow2", gemm, *PRODUCTS)
    own = [("rowwise_with_gw_hp", "wgrad")]
    for recipe, gemm in [*itertools.product(("blockwise", "rowwise"), GEMMS), *own]:
        run, quantized = GEMM_FUNCTIONS[recipe][gemm], (recipe, gemm) not in own
        blockwise = recipe == "blockwise"
        for f, dim in OPERANDS[recipe][gemm].items():
            add("dropped tail", {f: dropped_tail(dim)}, recipe, gemm, *PRODUCTS)
            if quantized:
                swap = swapped_scale_axis if blockwise else scale_of_the_next_row
                add("doubled scale", {f: doubled_scale}, recipe, gemm, *PRODUCTS)
                add("swapped scales", {f: swap}, recipe, gemm, *PRODUCTS)
        add("groups off by one", {"group_bounds": ends_off_by_one}, recipe, gemm, "grouped")
        if gemm != "wgrad":
            past = rows_past_the_end_written
            add("rows past the end written", {run: past}, recipe, gemm, "grouped")
            wrong = argument_of_the_next_group(2)
            add("another group's weight", {run: wrong}, recipe, gemm, "grouped")
            wrong = argument_of_the_next_group(3)
            add("another group's scale", {run: wrong}, recipe, gemm, "grouped")
        end = {"group_bounds": last_group_to_the_end}
        add("rows past the end taken", end, recipe, gemm, "grouped")
        add("rounded twice", {run: rounded_twice}, recipe, gemm, *PRODUCTS)
        if gemm == "wgrad":
            add("rounded twice", {run: rounded_twice}, recipe, gemm, "autocast")
        if not quantized:
            continue
        add("not quantized", NO_QUANTIZATION, recipe, gemm, *PRODUCTS)
        add("truncated", {"cast": truncated}, recipe, gemm, *PRODUCTS)
        add("scale a power of two", {"scale_of": power_of_two}, recipe, gemm, *PRODUCTS)
        swallowed = {"scale_of": nan_swallowed, "cast": nan_swallowed}
        add("NaN swallowed", swallowed, recipe, gemm, "non-finite")
        for f in ("dequantize_1x128", "dequantize_128x128") if blockwise else ("dequantize_row",):
            if (f, gemm) != ("dequantize_128x128", "wgrad"):
                add("dequantized to bf16", {f: bf16_dequantized}, recipe, gemm, *PRODUCTS)

    for recipe, weight_t, columns in (
        ("blockwise", "quantize_128x128_t", blocks_across_groups),
        ("rowwise", "quantize_weight_col_t", one_scale_for_all_groups),
    ):
        add("not transposed", {weight_t: not_transposed}, recipe, "weight", "weight")
        column = next(iter(OPERANDS[recipe]["wgrad"]))
        add("scales across groups", {column: columns}, recipe, "wgrad", "grouped")
        wrong = argument_of_the_next_group(3, -1 if recipe == "blockwise" else 0)
        run = GEMM_FUNCTIONS[recipe]["wgrad"]
        add("another group's scale", {run: wrong}, recipe, "wgrad", "grouped")
        no_zeroing = {"zero_padding": always(lambda q, *_: q)}
        add("NaN where no token stands", no_zeroing, recipe, "columns", "columns")
        divided = {"cast": always(lambda x, s: (x / s).to(E4M3))}
        add("divided by s", divided, recipe, "rows", "reciprocal")
        faults = {"scale_of": _reciprocal.scale_of, "cast": _reciprocal.cast}
        add("448 / amax", faults, recipe, "rows", "reciprocal")
        add("truncated", {"cast": truncated}, recipe, "rows", "every value")
        product = always(lambda amax, *_: amax.clamp(min=1e-12) * (1 / 448))
        add("amax · (1 / 448)", {"scale_of": product}, recipe, "rows", "rows")
        add("no floor", {"scale_of": always(lambda amax, *_: amax / 448)}, recipe, "rows", "rows")
    return table


@pytest.mark.parametrize("faults, recipe, gemm, check", mutations())
def test_mutation_is_noticed(monkeypatch, faults, recipe, gemm, check):
    # The values have to show it, not what the ops say of a wrong dtype.
    monkeypatch.setattr(Check, "__call__", lambda *args, **options: None)
    for name, mutate in faults.items():
        faulty = mutate(getattr(reference, name))
        for module in (reference, layouts):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, faulty)
    with pytest.raises(AssertionError, match=rf"^{gemm}\b"):
        CHECKS[check](recipe, gemm)


CONTROLS = sorted({param.values[1:] for param in mutations()})


@pytest.mark.parametrize("recipe, gemm, check", CONTROLS)
def test_checks_pass_without_a_mutation(recipe, gemm, check):
    CHECKS[check](recipe, gemm)
