"""The parts of the benchmarks that need no GPU."""

import importlib
import json

import pytest
import titan
import torch
from bench import block, common
from bench.shapes import uneven_ends
from tables import text_table
from torch._functorch import partitioners
from unpatched import restore

from titan_fp8 import kernels, reference
from titan_fp8.torchtitan_0_2 import patches

INPUTS = [(torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)) for _ in range(2)]


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """The number of functions timed, in place of their times: there is no GPU."""
    monkeypatch.setattr(common, "median_us", lambda functions: 10.0 * len(functions))


def square(factor: float = 1.0) -> common.Layer:
    weight = torch.eye(4, requires_grad=True)
    return common.Layer(lambda x: (x @ weight).square() * factor, (weight,))


def test_a_wrong_layer_has_no_time():
    layers = {"bf16": square, "close": lambda: square(1.05), "far": lambda: square(1.07)}
    layers["nan"] = lambda: square(float("nan"))
    good, close, far, nan = common.layer_rows(layers, INPUTS, limit=0.06)
    assert good == {"layer": "bf16", "error": 0, "us": 20.0, "x bf16": 1, "MiB kept": 256 / 2**20}
    assert close["us"] == 20.0 and close["error"] == pytest.approx(0.05, abs=1e-4)
    assert far["us"] == nan["us"] == "wrong"
    assert far["x bf16"] is nan["x bf16"] is None


def test_an_error_in_one_gradient_counts():
    want = [torch.ones(4), torch.ones(4)]
    assert common.relative_error([torch.ones(4), 2 * torch.ones(4)], want) == 1


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_uneven_ends(groups, alignment):
    ends = uneven_ends(groups, 16640, alignment)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.shape == (groups,) and ends[-1] == 16640 and not (ends % alignment).any()
    assert sizes.min() > 0 and (groups == 1 or sizes.max() >= 3 * sizes.min())


@pytest.mark.parametrize(
    "groups, m, alignment, problem",
    [
        (2, 256, 128, "found no 2 uneven groups of multiples of 128 in m = 256"),
        (1, 0, 16, "found no 1 uneven groups"),
        (2, 1000, 128, "m = 1000 must be a multiple of alignment = 128"),
    ],
)
def test_ends_that_cannot_be_uneven(groups, m, alignment, problem):
    with pytest.raises(ValueError, match=problem):
        uneven_ends(groups, m, alignment)


ROWS = [
    {"layer": "bf16", "us": 1234.5, "x bf16": 1.0},
    {"layer": "other", "us": None, "x bf16": None},
]


def test_a_report_is_printed_and_written(monkeypatch, tmp_path, capsys):
    where = {"command": "python bench.py", "card": "H200"}
    monkeypatch.setattr(common, "environment", lambda: where)
    common.report(ROWS, tmp_path / "x.json", "Layers", "All of them.", copy="4 GB/s")
    written = json.loads((tmp_path / "x.json").read_text())
    facts = {"title": "Layers", "about": "All of them.", "facts": {"copy": "4 GB/s"}, "rows": ROWS}
    assert written == facts | where
    lines = capsys.readouterr().out.splitlines()
    assert "card: H200" in lines
    assert lines[-3:] == ["layer     us  x bf16", "bf16   1,234    1.00", "other"]
    with pytest.raises(ValueError, match="same columns"):
        text_table([*ROWS, {"layer": "third"}])
    with pytest.raises(ValueError, match="must have at least one row"):
        text_table([])


@pytest.fixture
def gemm(monkeypatch):
    """The benchmark of GEMMs with the reference in place of kernels, on one small shape."""
    monkeypatch.setattr(kernels, "hopper", reference, raising=False)
    script = importlib.import_module("bench.gemm")
    for name, value in {
        "hopper": reference,
        "median_us": lambda products: 10.0,
        "randn": lambda *shape: torch.randn(shape, dtype=torch.bfloat16),
        "sets_beyond_l2": lambda size: 2,
    }.items():
        monkeypatch.setattr(script, name, value)
    return script


@pytest.mark.parametrize("op", ["blockwise_mm", "blockwise_wgrad", "rowwise_mm", "rowwise_wgrad"])
def test_a_wrong_product_ends_the_benchmark(gemm, op, monkeypatch):
    """Even if it is wrong in one block of one group alone."""
    call = "M-grouped", op, (3, 1024, 144, 272), torch.tensor([256, 640, 1024]).int(), 10.0
    row = gemm.row_of(*call)
    assert row["TFLOPS"] == pytest.approx(2 * 1024 * 144 * 272 / 10 / 1e6) and row["us"] == 10
    right = getattr(reference, op)

    def wrong(*args, **options):
        y = right(*args, **options)
        if not options:
            y.flatten(0, -2)[-144:, -16:] *= 1.5
        return y

    monkeypatch.setattr(reference, op, wrong)
    with pytest.raises(AssertionError, match="M-grouped .* wrong result"):
        gemm.row_of(*call)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "blockwise", "rowwise"])
def test_a_block_is_that_of_a_job(kind, compiled, tmp_path, fresh_torchtitan, monkeypatch):
    """Modules of the same classes, and the same ops that the compiler may recompute."""
    monkeypatch.setattr(torch, "compile", lambda module, fullgraph: module)
    flags = ["--quantize.linear.titan_fp8.recipe", kind, "--activation_checkpoint.mode", "none"]
    flags += ["--compile.enable"] if compiled else []
    model = titan.build(titan.job(tmp_path, "llama3", converters=(titan.LINEAR,)))
    own = block.converted(model.layers["0"], kind, compiled)
    found = [type(module) for module in own.modules()], partitioners.get_default_op_list()
    restore(patches.ON_CONVERSION)
    model = titan.converted(titan.job(tmp_path, "llama3", *flags, converters=(titan.LINEAR,)))
    want = [type(module) for module in model.layers["0"].modules()]
    assert found == (want, partitioners.get_default_op_list())
