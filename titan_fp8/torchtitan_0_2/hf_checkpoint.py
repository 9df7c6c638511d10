"""Block-FP8 Hugging Face checkpoints, such as exports, as `checkpoint.initial_load_path`.

torchtitan reads them with `initial_load_in_hf` and `initial_load_in_hf_quantized`, but only its
adapter of deepseek_v3 has a reader that multiplies by the scales. Other adapters, and that one
without the second flag, copy the FP8 values without their scales.

That reader multiplies blocks of 128 x 128 of any `NAME.weight` by `NAME.weight_scale_inv`, if the
index has one, and copies whatever else it finds. So a checkpoint whose scales have other names, or
belong to other blocks, would be loaded with wrong values, and so would integers. `has_fp8_weights`
refuses these. How activations are scaled (`activation_scheme`, `input_scale`) does not matter for a
run, which scales its own.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_fp8.layouts import BLOCK, cdiv

INDEX = "model.safetensors.index.json"
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
"""safetensors' names of the dtypes of weights in high precision, and of scales."""


def with_scales(load: Callable) -> Callable:
    """Wraps `CheckpointManager.dcp_load`: FP8 weights are loaded with their scales or not at all.

    The wrapped function raises ValueError where torchtitan would load weights without scales, or
    with scales of another format.
    """

    @functools.wraps(load)
    def dcp_load(
        self: Any, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if from_hf and has_fp8_weights(Path(checkpoint_id)):
            if not from_quantized:
                raise ValueError(
                    f"{checkpoint_id} has FP8 weights, and checkpoint.initial_load_in_hf_quantized "
                    "= false would load them without their scales: set it to true"
                )
            adapter = self.sd_adapter
            if type(adapter).get_hf_storage_reader is StateDictAdapter.get_hf_storage_reader:
                # The reader that torchtitan's adapter of deepseek_v3 returns.
                adapter.get_hf_storage_reader = lambda path, from_quantized: (
                    QuantizedHuggingFaceStorageReader(path, 4, torch.float32, BLOCK)
                )
        load(self, state_dict, checkpoint_id, from_hf, from_quantized)

    return dcp_load


def has_fp8_weights(folder: Path) -> bool:
    """Whether weights are quantized. All such are e4m3 with the scales that the reader expects.

    Raises:
        ValueError: they are not, or other weights have scales.
    """
    tensors = _read_headers(folder)
    quantized = [name for name, (dtype, _) in tensors.items() if _is_quantized(name, dtype)]
    if not quantized:
        return False
    file = folder / INDEX
    index = json.loads(file.read_bytes())["weight_map"] if file.exists() else {}
    for name in quantized:
        module = name.partition(".weight")[0]
        weight, scale = f"{module}.weight", f"{module}.weight_scale_inv"
        dtype, shape = tensors.get(weight, ("", ()))
        scale_dtype, scale_shape = tensors.get(scale, ("", ()))
        if (
            name not in (weight, scale)
            or dtype != "F8_E4M3"
            or len(shape) != 2
            or scale_dtype not in PLAIN_DTYPES
            or scale_shape != tuple(cdiv(size, BLOCK) for size in shape)
            or scale not in index
        ):
            found, size = tensors[name]
            raise ValueError(
                f"{folder}: {name} is {found} of shape {size}: allowed are matrices {weight} in "
                f"F8_E4M3 with {scale} in {INDEX}, a scale for each {BLOCK}x{BLOCK} block in "
                f"{' or '.join(PLAIN_DTYPES)}"
            )
    return True


def _is_quantized(name: str, dtype: str) -> bool:
    """Whether a tensor is, or belongs to, a quantized weight."""
    of_integers = name.endswith(".weight") and dtype not in PLAIN_DTYPES
    return dtype.startswith("F8") or of_integers or ".weight_scale" in name


def _read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, by safetensors' name, and the shape of each tensor."""
    from safetensors import SafetensorError, safe_open  # as PyTorch does, when it is needed

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    part = file.get_slice(name)
                    found[name] = part.get_dtype(), tuple(part.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from None
    return found
