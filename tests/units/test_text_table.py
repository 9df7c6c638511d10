"""Tables of text: aligned, whole, and without markup."""

import pytest

from titan_fp8.modules.report import text_table


@pytest.mark.parametrize("variables", [{}, {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "dumb"}])
def test_a_table_is_the_same_on_any_terminal(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    long = "layers.0.attention." + "w" * 90
    rows = [(long, "[red]9[/red]", "a b"), ("head",), ("数", "12", ":smile:")]
    assert text_table(rows, right={1}).splitlines() == [
        f"{long}  [red]9[/red]  a b",
        "head",
        f"数{' ' * (len(long) - 2)}{' ' * 12}12  :smile:",
    ]
    assert text_table([]) == ""
