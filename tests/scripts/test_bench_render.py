"""scripts/bench/render.py: from results to docs/kernels.md."""

import importlib
import shutil
from pathlib import Path

import pytest
from bench import __main__, render
from tables import markdown_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date_and_a_note_by_hand_shows(tmp_path: Path, capsys) -> None:
    assert render.main(["--check"]) == 0
    shutil.copytree(DOCS / "benchmarks", tmp_path / "benchmarks")
    at = ["--docs", str(tmp_path)]
    assert render.main([*at, "--check"]) == 1
    assert render.main(at) == 0
    page = tmp_path / "kernels.md"
    text = page.read_text()
    assert text == (DOCS / "kernels.md").read_text() and render.main([*at, "--check"]) == 0
    page.write_text(text + "\nA note by hand.\n")
    capsys.readouterr()
    assert render.main([*at, "--check"]) == 1
    assert "is out of date: run scripts/bench render" in capsys.readouterr().err
    assert page.read_text().endswith("A note by hand.\n")


def test_a_table_needs_equal_columns() -> None:
    with pytest.raises(ValueError, match="same columns"):
        markdown_table([{"a": 1}, {"b": 1}])


@pytest.mark.parametrize("name", __main__.BENCHMARKS)
def test_every_benchmark_imports_and_names_its_result(name: str) -> None:
    """Without a GPU, so that a name which the package no longer has shows."""
    benchmark = importlib.import_module(f"bench.{name}")
    about, *_ = benchmark.__doc__.split("\n\n")
    assert benchmark.TITLE and about.endswith(".") and callable(benchmark.measure)
