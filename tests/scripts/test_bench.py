"""The parts of the benchmarks that need no GPU, and summarize_trace.py."""

import importlib
import json
import pkgutil

import bench_block
import bench_common
import bench_host
import pytest
import summarize_trace
import titan
import torch
from shapes import uneven_ends
from tables import markdown_table, text_table
from torch._functorch import partitioners

from titan_fp8 import kernels, reference
from titan_fp8.kernels import launch
from titan_fp8.patches import restore
from titan_fp8.torchtitan_0_2 import patches

INPUTS = [(torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)) for _ in range(2)]


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """The number of functions timed, in place of their times."""
    monkeypatch.setattr(bench_common, "median_us", lambda functions: 10.0 * len(functions))


def square(factor: float = 1.0) -> bench_common.Layer:
    weight = torch.eye(4, requires_grad=True)
    return bench_common.Layer(lambda x: (x @ weight).square() * factor, (weight,))


def broken() -> bench_common.Layer:
    raise NotImplementedError("not on this card\nbut on others")


def test_a_wrong_layer_has_no_time():
    layers = {"bf16": square, "close": lambda: square(1.05), "far": lambda: square(1.07)}
    layers["nan"] = lambda: square(float("nan"))
    good, close, far, nan = bench_common.layer_rows(layers, {}, INPUTS, limit=0.06)
    assert good == {"layer": "bf16", "error": 0, "us": 20.0, "x bf16": 1, "MiB kept": 256 / 2**20}
    assert close["us"] == 20.0 and close["error"] == pytest.approx(0.05, abs=1e-4)
    assert far["us"] == nan["us"] == "wrong"
    assert far["x bf16"] is nan["x bf16"] is None


def test_benchmarks_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench_common.require_hopper(bench_common.parser("A benchmark."))
    assert "no GPU found: benchmarks need a Hopper GPU" in capsys.readouterr().err


def test_an_error_in_one_gradient_counts():
    want = [torch.ones(4), torch.ones(4)]
    assert bench_common.relative_error([torch.ones(4), 2 * torch.ones(4)], want) == 1


def test_a_broken_yardstick_leaves_its_row_empty_and_a_broken_layer_raises(capsys):
    *_, row = bench_common.layer_rows({"bf16": square}, {"other": broken}, INPUTS, limit=0.06)
    assert set(row.values()) == {"other", None}
    assert capsys.readouterr().err == (
        "bf16: 20 us\nother: NotImplementedError: not on this card\n"
    )
    with pytest.raises(NotImplementedError):
        bench_common.layer_rows({"bf16": square, "ours": broken}, {}, INPUTS, limit=0.06)


@pytest.mark.parametrize("measure", ["median_us", "Layer.kept_bytes"])
def test_a_yardstick_that_cannot_be_measured_leaves_its_row_empty(measure, monkeypatch, capsys):
    """Its result was right, so it is not called wrong."""
    answers = iter([10.0])

    def once(*args):
        if answer := next(answers, None):
            return answer
        raise torch.OutOfMemoryError("CUDA out of memory\nby far")

    monkeypatch.setattr(f"bench_common.{measure}", once)
    good, row = bench_common.layer_rows({"bf16": square}, {"other": square}, INPUTS, limit=0.06)
    assert isinstance(good["us"], float) and set(row.values()) == {"other", None}
    assert capsys.readouterr().err.endswith(" us\nother: OutOfMemoryError: CUDA out of memory\n")


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
        (4, 384, 128, "found no 4 uneven groups"),
        (1, 0, 16, "found no 1 uneven groups"),
        (2, 1000, 128, "m = 1000 must be a multiple of alignment = 128"),
    ],
)
def test_ends_that_cannot_be_uneven(groups, m, alignment, problem):
    with pytest.raises(ValueError, match=problem):
        uneven_ends(groups, m, alignment)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("blockwise_wgrad_kernel", "FP8 GEMM"),
        ("rowwise_fprop_dgrad_kernel", "FP8 GEMM"),
        ("quantize_1x128_kernel", "quantizers"),
        ("swiglu_backward_kernel", "SwiGLU"),
        ("permute_gather_kernel", "permutation"),
        ("transpose_fp8_kernel", "quantizers"),
        ("quantize_column_cast_kernel", "quantizers"),
        ("blockwise_fprop_dgrad_kernel", "FP8 GEMM"),
        ("rowwise_wgrad_kernel", "FP8 GEMM"),
        ("triton_poi_fused_index_put_3", "inductor"),
        ("triton_tem_fused_flex_attention_backward_transpose_view_1", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "GEMM"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_of_a_trace_are_told_apart(name, kind):
    assert summarize_trace.kind_of({"cat": "kernel", "name": name}) == kind
    assert summarize_trace.kind_of({"cat": "gpu_memcpy", "name": name}) == "copies"


def test_idle_time_of_a_trace():
    first, inside, later = ({"ts": t, "dur": d} for t, d in ((0, 10), (2, 3), (15, 5)))
    assert summarize_trace.gaps_between([later, first, inside]) == [(5, later)]


@pytest.mark.parametrize("text", [None, "", "[1]", '{"traceEvents": [{"ph": "X", "name": "k"}]}'])
def test_a_file_that_is_not_a_trace(text, tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.json"
    if text is not None:
        trace.write_text(text)
    monkeypatch.setattr("sys.argv", ["summarize_trace.py", str(trace)])
    with pytest.raises(SystemExit, match="2"):
        summarize_trace.main()
    assert f"{trace} is not a trace of torch.profiler" in capsys.readouterr().err


def test_kernels_of_ours_have_a_kind():
    """The kind of a kernel follows from the module that it is in."""
    kinds = {"gemm": "FP8 GEMM", "quantize": "quantizers", "transpose": "quantizers"}
    kinds |= {"swiglu": "SwiGLU", "permute": "permutation", "gemm_bf16": "grouped GEMM"}
    kinds |= {"gradients": "FSDP copies"}
    found = pkgutil.walk_packages(kernels.__path__, "titan_fp8.kernels.")
    modules = [importlib.import_module(info.name) for info in found]
    ours = {k for m in modules for k in vars(m).values() if isinstance(k, launch.Kernel)}
    assert len(ours) > 15
    for kernel in ours:
        kind = summarize_trace.kind_of({"cat": "kernel", "name": kernel.__name__})
        module = kernel.fn.__module__.rpartition(".")[2]
        assert kind == kinds.get(module, kinds[module.partition("_")[0]]), kernel.__name__


ROWS = [
    {"layer": "bf16", "us": 1234.5, "x bf16": 1.0},
    {"layer": "other", "us": None, "x bf16": None},
]


def test_a_report_is_printed_and_written(monkeypatch, tmp_path, capsys):
    where = {"command": "python bench.py", "card": "H200"}
    monkeypatch.setattr(bench_common, "environment", lambda: where)
    bench_common.report(ROWS, tmp_path / "x.json", "Layers", "All of them.", copy="4 GB/s")
    written = json.loads((tmp_path / "x.json").read_text())
    facts = {"title": "Layers", "about": "All of them.", "facts": {"copy": "4 GB/s"}, "rows": ROWS}
    assert written == facts | where
    lines = capsys.readouterr().out.splitlines()
    assert "card: H200" in lines
    assert lines[-3:] == ["layer     us  x bf16", " bf16  1,234    1.00", "other"]
    with pytest.raises(ValueError, match="same columns"):
        bench_common.report([*ROWS, {"layer": "third"}], None, "Layers", "All of them.")


@pytest.mark.parametrize("table", [text_table, markdown_table])
def test_a_table_without_rows(table):
    with pytest.raises(ValueError, match="must have at least one row"):
        table([])


def test_a_case_that_does_not_exist(monkeypatch, tmp_path, capsys):
    file = tmp_path / "host.json"
    monkeypatch.setattr("sys.argv", ["bench_host.py", "--only", "nosuch", "--json", str(file)])
    with pytest.raises(SystemExit, match="2"):
        bench_host.main()
    printed = capsys.readouterr().err
    assert "--only 'nosuch' is in no name of a case; these are ['small linear, eager'," in printed
    assert not file.exists()


@pytest.fixture
def bench_gemm(monkeypatch):
    monkeypatch.setattr(kernels, "hopper", reference, raising=False)
    script = importlib.import_module("bench_gemm")
    monkeypatch.setattr(script, "median_us", lambda products: 10.0)
    return script


def test_a_library_that_fails_is_no_missing_library(bench_gemm, capsys):
    size, dims = 1 << 30, (1, 1000, 100, 10)
    assert bench_gemm.attempt("DeepGEMM", None, size, dims) is None
    assert bench_gemm.attempt("cuBLAS", lambda: lambda: None, size, dims) == 0.2
    assert not capsys.readouterr().err

    def make():
        return torch.nosuch

    assert bench_gemm.attempt("cuBLAS", make, size, dims) is None
    assert capsys.readouterr().err == (
        "cuBLAS (1, 1000, 100, 10): AttributeError: module 'torch' has no attribute 'nosuch'\n"
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "blockwise", "rowwise"])
def test_a_block_is_that_of_a_job(kind, compiled, tmp_path, fresh_torchtitan, monkeypatch):
    """Modules of the same classes, and the same ops that the compiler may recompute."""
    monkeypatch.setattr(torch, "compile", lambda block, fullgraph: block)
    flags = ["--quantize.linear.titan_fp8.recipe", kind, "--activation_checkpoint.mode", "none"]
    flags += ["--compile.enable"] if compiled else []
    model = titan.build(titan.job(tmp_path, "llama3", converters=(titan.LINEAR,)))
    block = bench_block.converted(model.layers["0"], kind, compiled)
    found = [type(module) for module in block.modules()], partitioners.get_default_op_list()
    restore(patches.ON_CONVERSION)
    model = titan.converted(titan.job(tmp_path, "llama3", *flags, converters=(titan.LINEAR,)))
    want = [type(module) for module in model.layers["0"].modules()]
    assert found == (want, partitioners.get_default_op_list())
