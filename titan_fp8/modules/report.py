"""The report of a conversion, and tables of text with aligned columns."""

import io
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text


def text_table(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows, one a line, columns two spaces apart; those in `right` are aligned to the right.

    A row may be shorter than others. Lines are as long as they must be, and end in no space.
    """
    rows = list(rows)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for i in range(max(map(len, rows), default=0)):
        grid.add_column(justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    # Plain text, whatever the environment says of the terminal.
    Console(file=out, width=1 << 30, color_system=None, force_terminal=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@dataclass
class ConversionReport:
    """What a conversion did, one row (name, shape, recipe or reason) per candidate module.

    `converted` says which recipe a module now has; `left` says why a module was not converted.
    """

    converted: list[tuple[str, str, str]] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, shape: str, recipe: str, why_left: str | None) -> bool:
        """Adds a row, and returns whether the module is to be converted: nothing speaks against."""
        rows = self.converted if why_left is None else self.left
        rows.append((name, shape, recipe if why_left is None else why_left))
        return why_left is None

    def __str__(self) -> str:
        """A table of all candidates, ready for a log."""
        rows = [("module", "shape", "recipe / left in high precision because"), *self.converted]
        rows += [(name, shape, f"- {reason}") for name, shape, reason in self.left]
        return textwrap.indent(text_table(rows), "  ")
