"""Block-FP8 Hugging Face checkpoints, such as exports, as `checkpoint.initial_load_path`.

torchtitan reads them with `initial_load_in_hf` and `initial_load_in_hf_quantized`, but only its
adapter of deepseek_v3 has a reader that multiplies by the scales. The adapters of other models warn
and copy the FP8 values without their scales, and so does that of deepseek_v3 without the second
flag.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_fp8.layouts import BLOCK

QUANTIZED = "checkpoint.initial_load_in_hf_quantized"
LARGEST_HEADER = 100_000_000
"""In bytes, as the safetensors library has it."""


def with_scales(load: Callable) -> Callable:
    """Wraps `CheckpointManager.dcp_load`: FP8 weights are loaded with their scales or not at all.

    The wrapped function raises ValueError where torchtitan would load the weights without scales.
    """

    @functools.wraps(load)
    def dcp_load(
        self: Any, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        folder = Path(checkpoint_id)
        if from_hf and _has_fp8(folder):
            method = _quant_method(folder)
            if method != "fp8":
                raise ValueError(
                    f"{folder} has FP8 weights, and quant_method = {method!r} in the "
                    "quantization_config of its config.json: only 'fp8' can be read, DeepSeek's "
                    "format; a folder without config.json is an incomplete export"
                )
            if not from_quantized:
                raise ValueError(
                    f"{checkpoint_id} has FP8 weights (quantization_config in its config.json), and"
                    f" {QUANTIZED} = false would load them without their scales: set it to true"
                )
            adapter = self.sd_adapter
            if type(adapter).get_hf_storage_reader is StateDictAdapter.get_hf_storage_reader:
                adapter.get_hf_storage_reader = _dequantizing_reader
        load(self, state_dict, checkpoint_id, from_hf, from_quantized)

    return dcp_load


def _dequantizing_reader(path: str, from_quantized: bool) -> QuantizedHuggingFaceStorageReader:
    """The reader that torchtitan's adapter of deepseek_v3 returns."""
    return QuantizedHuggingFaceStorageReader(
        path, thread_count=4, target_dtype=torch.float32, block_size=BLOCK
    )


def _has_fp8(folder: Path) -> bool:
    """Whether any tensor of the folder's safetensors is in FP8, by their headers."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            try:
                header = json.loads(opened.read(min(size, LARGEST_HEADER)))
                if any(entry.get("dtype", "").startswith("F8_") for entry in header.values()):
                    return True
            except (ValueError, AttributeError):
                continue  # Loading it will say what is wrong.
    return False


def _quant_method(folder: Path) -> str | None:
    """quantization_config.quant_method of the folder's config.json, if it has both.

    Raises:
        ValueError: config.json is not JSON.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
        return config["quantization_config"]["quant_method"]
    except (FileNotFoundError, KeyError, TypeError):
        return None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
