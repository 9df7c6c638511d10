"""The table of the paired runs: its statistics by hand, its verdicts, what it refuses."""

import json

import numpy as np
import pytest
import table

LEVELS = {"tenth": 6.0, "third": 5.0, "two_thirds": 4.5, "end": 4.0}
T_3 = 4.302652729911275
"""Student's t for 95 % and three values, from a printed table."""


def write(path, arms: dict[str, list[float]], experts: bool = False, **changes):
    """Runs whose losses differ from those of bf16, in per cent, by seed; seeds differ a lot."""
    lines = []
    for arm, gaps in arms.items():
        for seed, gap in enumerate(gaps, 1):
            scale = (1 + gap / 100) * (1 + seed / 10)
            lines.append(
                {"model": "m", "experiment": "e", "commit": "c", "arm": arm, "seed": seed}
                | {"device": "GPU", "versions": {"torch": "2"}, "experts": experts, "world": 1}
                | {"steps": 620, "tokens": 20_316_160, "weights": 1e4 * seed, "order": seed}
                | {"held_out": {part: level * scale for part, level in LEVELS.items()}}
                | {"last_third": 4.2 * scale}
                | (changes if arm != "bf16" else {})
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def read(tmp_path):
    def call(arms, **options):
        return table.read([write(tmp_path / "r.jsonl", {"bf16": [0.0] * 3} | arms, **options)])[0]

    return call


def test_mean_and_interval_of_paired_differences(read):
    """0.1, 0.2 and 0.3 %: mean 0.2, standard deviation 0.1."""
    model = read({"blockwise": [0.1, 0.2, 0.3]})
    for part in (*LEVELS, "last_third"):
        assert model.differences("blockwise", part) == pytest.approx([0.1, 0.2, 0.3])
    end = model.end("blockwise")
    assert end.mean == pytest.approx(0.2)
    assert end.half == pytest.approx(T_3 * 0.1 / np.sqrt(3))


def test_seeds_needed():
    """With 25 values t is 2.064, so ± 0.0413 for a spread of 0.1; with 24 it is ± 0.0422."""
    values = np.array([-0.1, 0.0, 0.1])
    assert table.seeds_needed(values, 0.0415) == 25
    assert table.seeds_needed(values, 1.0) == 2
    assert table.seeds_needed(values, 1e-4) is None


@pytest.mark.parametrize(
    ("mean", "half", "null", "expected"),
    [
        (0.10, 0.14, 0.0, "equivalent"),
        (-0.10, 0.16, 0.0, "not shown"),
        (0.10, 0.05, 0.0, "equivalent, yet differs"),
        (0.10, 0.05, 0.08, "equivalent"),
        (0.30, 0.20, 0.0, "differs"),
        (0.30, 0.20, 0.15, "not shown"),
        (-0.60, 0.20, 0.15, "differs"),
        (0.00, np.inf, 0.0, "not shown"),
        (np.nan, np.nan, 0.0, "not finite"),
    ],
)
def test_verdicts(mean, half, null, expected):
    assert table.verdict(table.Interval(mean, half), null) == expected


def test_prints_a_row_for_each_arm_and_draws_them(tmp_path, capsys):
    arms = {"bf16": [0.0] * 3, "control": [3.0, 4.0, 5.0], "null": [-0.01, 0.0, 0.01]}
    arms |= {"rowwise": [np.nan, 0.0, 0.0], "blockwise": [0.1, 0.2, 0.3], "errors": [0.5]}
    results, plot = write(tmp_path / "r.jsonl", arms), tmp_path / "p.png"
    assert table.main([str(results), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "The control is found in 3 of 3 seeds" in out
    rows = [line.split(" | ") for line in out.splitlines() if "`" in line]
    rows = {row[0].strip("| `"): row[1:] for row in rows}
    assert [*rows][0] == "null" and rows["null"][-2] == "the null"
    assert rows["control"][-2:] == ["differs", "384 |"]
    assert rows["rowwise"][-2] == "not finite" and rows["errors"][-2] == "not shown"
    assert rows["blockwise"] == ["3", *["+0.200 ± 0.248"] * 5, "not shown", "4 |"]
    assert plot.stat().st_size > 10_000


def test_control_is_found_where_it_exceeds_every_null(read):
    arms = {"null": [-0.3, 0.0, 0.1], "control": [0.2, 0.4, -9.0]}
    assert "found in 1 of 3 seeds" in table.found(read(arms))
    assert table.found(read({"null": [0.1]})) == "No control ran. "


def test_writes_into_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table.py: begin -->\n<!-- end -->\nb\n")
    for gap in (0.1, 0.2):  # the second table takes the place of the first
        results = write(tmp_path / "r.jsonl", {"bf16": [0.0] * 2, "null": [0.0, gap]})
        assert table.main([str(results), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("a\n<!-- table.py: begin -->\n\n### m\n")
    assert text.endswith("\n\n<!-- end -->\nb\n") and text.count("`null`") == 1
    assert "+0.100" in text


def test_models_with_experts_need_fewer_seeds(read):
    more = [
        table.more_seeds(read({"blockwise": [0.0, 0.2, 0.4]}, experts=experts), "blockwise")
        for experts in (False, True)
    ]
    assert more == ["15", "2"]


def test_seeds_without_bf16_do_not_count(read):
    assert len(read({"blockwise": [0.1, 0.2, 0.3, 9.0]}).differences("blockwise", "end")) == 3


@pytest.mark.parametrize("key", ["weights", "order", "steps", "tokens", "world"])
def test_refuses_runs_that_are_no_pair(read, key):
    with pytest.raises(ValueError, match=f"blockwise and bf16 of seed 1 are no pair: {key}"):
        read({"blockwise": [0.1, 0.2]}, **{key: 2}).end("blockwise")


def test_refuses_a_mixture(read, tmp_path, capsys):
    with pytest.raises(ValueError, match="mix runs with different TOMLs, texts or flags"):
        read({"blockwise": [0.1]}, experiment="other")
    file = str(write(tmp_path / "r.jsonl", {"bf16": [0.0]}))
    assert table.main([file, file]) == 2
    assert "bf16, seed 1 is there twice" in capsys.readouterr().err
    assert table.main([str(write(tmp_path / "r.jsonl", {"null": [0.0]}))]) == 2
    assert "no runs of bf16" in capsys.readouterr().err
