"""bench/release.py: a table and a chart from results of bench/plans.py."""

import json

import pytest
from bench import release


def result(file, card, runs, commit="abc1234"):
    """A file of results: `runs` are (plan, recipe, tokens/s or an error)."""
    rows = []
    for plan, recipe, speed in runs:
        row = {"plan": plan, "recipe": recipe, "tokens/s": speed, "GiB": 50.0, "compute %": 90.0}
        if isinstance(speed, str):
            row |= dict.fromkeys(("tokens/s", "GiB", "compute %"))
        rows.append(row | {"error": speed if isinstance(speed, str) else None})
    where = {"commit": commit, "torch": "2.11.0", "card": card}
    file.write_text(json.dumps({**where, "rows": rows}))
    return str(file)


def test_repeats_of_several_files(tmp_path, capsys):
    plan, chart = "llama3-8b-fsdp4", tmp_path / "speed.svg"
    runs = [(plan, "bf16", 1000), (plan, "rowwise", 1200), (plan, "torchao rowwise", "no memory")]
    first = result(tmp_path / "1.json", "H100", runs)
    more = [(plan, "bf16", 1100), (plan, "bf16", 900), (plan, "rowwise", 1300)]
    more += [(plan, "bf16 tuned", 1000), (plan, "blockwise", 1100)]
    second = result(tmp_path / "2.json", "H100", more)
    other_card = result(tmp_path / "3.json", "H200", [(plan, "bf16", 1500)])
    assert release.main([first, second, other_card, "--chart", str(chart)]) == 0
    out = capsys.readouterr().out.splitlines()
    title = "Llama3-8B, FSDP 4, 1 x 8192"
    assert (
        f"| {title}, H100 | 1,000 | 1,250, 1.25x | failed | 1,000, 1.00x | 1,100, 1.10x | 1.10x |"
        in out
    )
    missing = " | not measured" * 4
    assert f"| {title}, H200 | 1,500{missing} |  |" in out
    assert f"| {title}, H100 | rowwise | 1,250 | 1.25 | 8 | 50.0 | 90 | 2 |  |" in out
    assert f"| {title}, H100 | stock bf16 | 1,000 | 1.00 | 20 | 50.0 | 90 | 3 |  |" in out
    drawn = chart.read_bytes()
    release.main([first, second, other_card, "--chart", str(chart)])
    assert chart.read_bytes() == drawn and b"<svg" in drawn


@pytest.mark.parametrize("plan, commit, message", [
    ("llama3-8b", "def5678", "commit abc1234, torch 2.11.0 and of commit def5678, torch 2.11.0"),
    ("x", "abc1234", "2.json is no result of"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(plan, commit, message, tmp_path, capsys):
    files = [result(tmp_path / "1.json", "H100", [("llama3-8b", "bf16", 1)])]
    files.append(result(tmp_path / "2.json", "H100", [(plan, "bf16", 1)], commit))
    with pytest.raises(SystemExit):
        release.main(files)
    assert message in capsys.readouterr().err
