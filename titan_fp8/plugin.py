"""The plugin's entry point: `[job] custom_config_module = "titan_fp8.plugin"` in a TOML loads it.

Importing this module registers the two model converters with torchtitan 0.2 and exports the
`JobConfig` whose `[quantize]` section torchtitan merges into its own.
"""

from titan_fp8.torchtitan_0_2 import (
    converters,  # noqa: F401  (registers the converters)
    hf_checkpoint,
    patches,
)
from titan_fp8.torchtitan_0_2.config import JobConfig, checked_cli

__all__ = ["JobConfig"]

patches.CONFIG_CHECK.apply(checked_cli)
patches.FP8_CHECKPOINTS.apply(hf_checkpoint.with_scales)
