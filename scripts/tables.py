"""Tables of results, as text for a terminal and as Markdown for docs. Also names as text."""

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


def cells(rows: Sequence[Row]) -> tuple[list[list[str]], set[int]]:
    """The header and the rows as strings, and which columns hold only numbers.

    Raises:
        ValueError: there is no row, or rows differ in their columns.
    """
    if not rows:
        raise ValueError("a table must have at least one row")
    columns = list(rows[0])
    if any(list(row) != columns for row in rows):
        raise ValueError("the rows of a table must have the same columns in the same order")
    numeric = (all(isinstance(row[name], int | float | None) for row in rows) for name in columns)
    body = [[cell(name, row[name]) for name in columns] for row in rows]
    return [columns, *body], {i for i, each in enumerate(numeric) if each}


def text_table(rows: Sequence[Row]) -> str:
    from titan_fp8.modules.report import text_table as aligned

    return aligned(*cells(rows))


def markdown_table(rows: Sequence[Row]) -> str:
    (header, *body), numeric = cells(rows)
    rule = ["--:" if i in numeric else "---" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))
