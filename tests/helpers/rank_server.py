"""Imported by the server of ranks: what each rank would otherwise import and prepare by itself."""

import plan_ranks  # noqa: F401  (prepares the CPU before torchtitan is imported)
import pytest  # noqa: F401
import titan  # noqa: F401
from parsing import parse_args

# Imports titan_fp8's converters. tyro keeps what it finds out about the config classes.
parse_args(["--job.custom_config_module", "titan_fp8.plugin"])
