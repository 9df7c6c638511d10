"""torchtitan's parser of command lines, without help texts."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def without_help_texts() -> AbstractContextManager:
    """torchtitan parses a command line in a third of the time.

    To find the help text of each flag, tyro parses the sources of all config classes in every call.
    """
    return mock.patch("tyro._docstrings.get_field_docstring", return_value=None)


def parse_args(flags: list[object]) -> Any:
    """What `ConfigManager().parse_args` of torchtitan 0.2 and 0.3 returns."""
    from torchtitan.config import ConfigManager

    with without_help_texts():
        return ConfigManager().parse_args([*map(str, flags)])
