"""plot_health.py: what it reads, says and draws, and what it refuses."""

import itertools

import numpy as np
import plot_health
import pytest
from loss_runs import dump  # also puts scripts/ on the path
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

WQ = [f"layers.{i}.attention.wq" for i in (0, 2, 10)]
EXPERTS = "layers.2.moe.experts"


def write(folder, scalars: dict[str, dict[int, float]], time: float = 1e9) -> None:
    """An event file with these values by tag and step."""
    writer = EventFileWriter(str(folder))
    for tag, steps in scalars.items():
        for step, value in steps.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=time + step, step=step, summary=summary))
    writer.close()


def of_layers(name: str, *values: dict[int, float]) -> dict[str, dict[int, float]]:
    return {f"health_layer_{name}/{layer}": v for layer, v in zip([*WQ, f"{EXPERTS}.w1"], values)}


@pytest.fixture
def run(tmp_path):
    """Three linears and experts in steps 10 and 20; at step 20 one linear had a NaN."""
    folder = tmp_path / "run" / "tb" / "20260101-0000"
    steps = {10: 0.001, 20: 0.002}
    scalars = {
        **of_layers("underflow", steps, {10: 0.0, 20: 0.125}, steps, steps),
        **of_layers("error", steps, steps, steps, {10: 0.0265, 20: 0.025}),
        **of_layers("non_finite", {10: 0.0, 20: 0.0}, {10: 0.0, 20: 0.5}),
        **of_layers("scale_spread", *[{10: 3.0, 20: 4.0}] * 4),
        f"health_tokens_per_expert/{EXPERTS}/mean": {10: 100.0, 20: 100.0},
        f"health_tokens_per_expert/{EXPERTS}/max": {10: 130.0, 20: 250.0},
        "loss_metrics/global_avg_loss": {10: 2.0, 20: 1.0},
    }
    write(folder, scalars)
    return tmp_path / "run"


def test_it_says_what_is_worst_and_draws(run, tmp_path, capsys):
    out = tmp_path / "new folder" / "plot.png"
    assert plot_health.main([str(run), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "largest underflow: 12.50%, layers.2.attention.wq, step 20",
        "largest error: 2.65%, layers.2.moe.experts.w1, step 10",
        "NaN or Inf from step 20 on: layers.2.attention.wq",
        f"plot: {out}",
    ]
    assert out.is_file()


def test_a_row_is_a_layer_and_a_column_a_step(run):
    health = plot_health.read_health(run)
    underflow, _, _, tokens = plot_health.pictures(health)
    assert plot_health.in_order([f"{EXPERTS}.w1", *reversed(WQ)]) == [f"{EXPERTS}.w1", *WQ]
    assert tokens.values == {EXPERTS: {10: pytest.approx(1.3), 20: 2.5}}
    figure = Figure()
    axes = figure.subplots()
    plot_health.draw_one(figure, axes, underflow, [10, 20], {(WQ[1], 20)})
    grid = axes.images[0].get_array()
    np.testing.assert_allclose(grid, [[0.001, 0.002], [0, 0.125], [0.001, 0.002], [0.001, 0.002]])
    (crosses,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert crosses.get_xydata().tolist() == [[1, 1]]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*WQ, f"{EXPERTS}.w1"]


def test_labels_do_not_touch(monkeypatch, tmp_path):
    """Steps of five digits, and more layers than have room for their names."""
    layers = [f"layers.{i}.{w}" for w in ("attention.wq", "attention.wo") for i in range(60)]
    layers += ["layers.0.feed_forward.w1", "output"]
    steps = dict.fromkeys(range(1000, 20000, 1000), 0.1)
    health = {
        f"health_layer_{name}/{layer}": steps
        for name in ("underflow", "error", "scale_spread")
        for layer in layers
    }
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))
    plot_health.draw(health, tmp_path / "plot.png")
    (figure,) = figures
    figure.canvas.draw()
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == layers[::3]


def test_a_resumed_run_continues_and_its_last_value_wins(run):
    folder = run / "tb" / "20260101-0100"
    write(folder, of_layers("underflow", {20: 0.5, 30: 0.25}), time=1e9 + 1000)
    health = plot_health.read_health(run)
    assert health[f"health_layer_underflow/{WQ[0]}"] == {
        10: pytest.approx(0.001),
        20: 0.5,
        30: 0.25,
    }


@pytest.mark.parametrize("first", [{}, {10: 0.01}])
def test_a_run_in_which_nothing_is_finite_any_more(tmp_path, capsys, first):
    """torchtitan's logger gets no underflow, error or spread from an operand that is all NaN."""
    bad = dict.fromkeys(first, 0.0) | {20: 1.0}
    scalars = {**of_layers("non_finite", bad, bad)}
    for name in ("underflow", "error", "scale_spread"):
        scalars |= {tag: steps for tag, steps in of_layers(name, first, first).items() if steps}
    write(tmp_path / "run/tb/20260101-0000", scalars)
    out = tmp_path / "x.png"
    assert plot_health.main([str(tmp_path / "run"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "NaN or Inf from step 20 on: layers.0.attention.wq, layers.2.attention.wq" in said
    assert ("largest underflow" in said) == bool(first) and out.exists()


def test_what_cannot_be_drawn_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, reason in (
        (tmp_path / "none", "no such file or folder"),
        (tmp_path / "empty", "enable_tensorboard"),
        (dump(tmp_path, "without", {1: 2.0}), "health_freq"),
    ):
        assert plot_health.main([str(folder), "--out", str(tmp_path / "x.png")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("plot_health: error:") and str(folder) in error and reason in error
    assert not (tmp_path / "x.png").exists()
