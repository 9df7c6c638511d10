"""The plugin for torchtitan 0.2.2. `[job] custom_config_module = "titan_fp8.plugin"` loads it.

Importing it registers the two converters and has torchtitan check our sections with its own.
"""

from titan_fp8.plugin import converters  # noqa: F401  (registers the converters)
from titan_fp8.plugin.config import JobConfig, check_with_host

__all__ = ["JobConfig"]

check_with_host()
