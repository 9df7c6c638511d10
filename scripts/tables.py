"""Tables of benchmark results, as text for a terminal and as Markdown for docs/benchmarks.md.

Also names of files as text.
"""

from collections.abc import Sequence

Row = dict[str, object]
"""A result: column name -> value. None is a cell without a value."""

FORMATS = {
    "tokens/s": ",.0f",
    "x bf16": ".2f",
    "GiB": ".1f",
    "loss": ".4f",
    "gap %": "+.3f",
}
"""How the numbers of a column are written, where it is not with three significant digits."""


def printable(name: object) -> str:
    """A name, such as a path, with a backslash and a code for each byte that is not UTF-8."""
    return str(name).encode(errors="backslashreplace").decode()


def cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        default = ".3g" if abs(value) < 10 else ",.0f"
        return format(value, FORMATS.get(column, default))
    return str(value)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The header and the rows as strings; every row has the columns of the first."""
    if not rows:
        raise ValueError("a table must have at least one row")
    columns = list(rows[0])
    if any(list(row) != columns for row in rows):
        raise ValueError("the rows of a table must have the same columns in the same order")
    return [columns, *([cell(name, row[name]) for name in columns] for row in rows)]


def text_table(rows: Sequence[Row]) -> str:
    table = cells(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in table)


def markdown_table(rows: Sequence[Row]) -> str:
    """Columns that hold only numbers are aligned to the right."""
    header, *body = cells(rows)
    numeric = [all(isinstance(row[name], int | float | None) for row in rows) for name in header]
    rule = ["--:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))
