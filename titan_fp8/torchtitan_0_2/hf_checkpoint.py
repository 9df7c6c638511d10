"""Block-FP8 Hugging Face checkpoints, such as exports, as `checkpoint.initial_load_path`.

torchtitan reads them with `initial_load_in_hf` and `initial_load_in_hf_quantized`, but only its
adapter of deepseek_v3 has a reader that multiplies by the scales. The adapters of other models warn
and copy the FP8 values without their scales, and so does that of deepseek_v3 without the second
flag.

That reader multiplies blocks of 128 x 128 of any `NAME.weight` by `NAME.weight_scale_inv`, if the
index has one, and copies whatever else it finds. So a checkpoint whose scales have other names, or
belong to other blocks, would be loaded with wrong values; `_check` refuses it. How activations are
scaled (`activation_scheme`, `input_scale`) does not matter for a run, which scales its own.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_fp8.layouts import BLOCK, cdiv

QUANTIZED = "checkpoint.initial_load_in_hf_quantized"
INDEX = "model.safetensors.index.json"
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
SCALE_DTYPES = ("F32", "BF16", "F16")


class _Entry(NamedTuple):
    """A tensor of a safetensors file, by its header: safetensors' name of the dtype, the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def with_scales(load: Callable) -> Callable:
    """Wraps `CheckpointManager.dcp_load`: FP8 weights are loaded with their scales or not at all.

    The wrapped function raises ValueError where torchtitan would load the weights without scales,
    or with scales of another format.
    """

    @functools.wraps(load)
    def dcp_load(
        self: Any, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        folder = Path(checkpoint_id)
        tensors = _headers(folder) if from_hf else {}
        if any(entry.dtype.startswith("F8_") for entries in tensors.values() for entry in entries):
            left = _check_config(folder)
            if not from_quantized:
                raise ValueError(
                    f"{checkpoint_id} has FP8 weights (quantization_config in its config.json), and"
                    f" {QUANTIZED} = false would load them without their scales: set it to true"
                )
            _check(folder, tensors, left)
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


def _headers(folder: Path) -> dict[str, list[_Entry]]:
    """The tensors of all safetensors files by name; a name may be in several files."""
    from safetensors import SafetensorError, safe_open  # as PyTorch does, when it is needed

    found = defaultdict(list)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    part = file.get_slice(name)
                    found[name].append(_Entry(path.name, part.get_dtype(), (*part.get_shape(),)))
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def _check_config(folder: Path) -> list[str]:
    """The names of config.json that are not in FP8.

    Raises:
        ValueError: config.json is not JSON, or has no quantization that the reader reverts.
    """
    config = _read_json(folder / "config.json").get("quantization_config")
    config = config if isinstance(config, dict) else {}
    method, size = config.get("quant_method"), config.get("weight_block_size")
    if method != "fp8":
        raise ValueError(
            f"{folder} has FP8 weights, and quant_method = {method!r} in the quantization_config of"
            " its config.json: only 'fp8' can be read, DeepSeek's format; a folder without "
            "config.json is an incomplete export"
        )
    if size != [BLOCK, BLOCK]:
        raise ValueError(
            f"{folder} has FP8 weights, and weight_block_size = {size!r} in the quantization_config"
            f" of its config.json: only {[BLOCK, BLOCK]} can be read"
        )
    return [*(config.get("modules_to_not_convert") or config.get("ignored_layers") or [])]


def _check(folder: Path, tensors: Mapping[str, list[_Entry]], left: list[str]) -> None:
    """ValueError unless each FP8 weight is e4m3 and has the scales that the reader expects."""
    index_file = folder / INDEX
    if not index_file.is_file():
        raise ValueError(
            f"{folder} has FP8 weights and no {INDEX}, by which their scales are found"
        )
    index = _read_json(index_file).get("weight_map", {})
    for name in sorted(tensors):
        entry, *others = tensors[name]
        is_fp8, is_scale = entry.dtype.startswith("F8_"), name.endswith(SCALE)
        if not (is_fp8 or is_scale):
            continue
        where = f"{folder / entry.file}: {name}"
        if others:
            raise ValueError(f"{where} is in {others[0].file} as well: remove the older file")
        if index.get(name) != entry.file:
            raise ValueError(f"{where}: {INDEX} has it in {index.get(name) or 'no file'}")
        if is_scale:
            weight = name.removesuffix(SCALE) + WEIGHT
            if weight not in tensors:
                raise ValueError(f"{where} has no {weight} that it is the scale of")
            found = tensors[weight][0].dtype
            if not found.startswith("F8_"):
                raise ValueError(f"{where} is the scale of a weight in {found}: allowed is F8_E4M3")
            continue
        if entry.dtype != "F8_E4M3":
            raise ValueError(f"{where} is in {entry.dtype}: allowed is F8_E4M3")
        if not name.endswith(WEIGHT) or len(entry.shape) != 2:
            raise ValueError(
                f"{where} is in FP8 with shape {entry.shape}: allowed are matrices that are called "
                f"NAME{WEIGHT} and have their scales in NAME{SCALE}"
            )
        module = name.removesuffix(WEIGHT)
        if listed := next((n for n in left if f".{n}." in f".{module}."), None):
            raise ValueError(
                f"{where} is in FP8, and modules_to_not_convert in config.json has {listed!r}"
            )
        _check_scale(folder, where, module, entry.shape, tensors)
    _check_values(folder, tensors)


def _check_scale(
    folder: Path,
    where: str,
    module: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, list[_Entry]],
) -> None:
    """ValueError unless the FP8 weight of a module has one scale per block, and no others."""
    blocks = tuple(cdiv(size, BLOCK) for size in shape)
    allowed = (
        f"allowed is {module}{SCALE} with shape {blocks}, one for each {BLOCK}x{BLOCK} block, in "
        f"{' or '.join(SCALE_DTYPES)}"
    )
    scale = f"{module}{SCALE}"
    others = [n for n in tensors if n.startswith(f"{module}{WEIGHT}_") and n != scale]
    if others or scale not in tensors:
        found = f"has {', '.join(sorted(others))}" if others else "has no scales"
        raise ValueError(f"{where} {found}: {allowed}")
    entry = tensors[scale][0]
    if entry.shape != blocks or entry.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{folder / entry.file}: {scale} has shape {entry.shape} in {entry.dtype}: {allowed}"
        )


def _check_values(folder: Path, tensors: Mapping[str, list[_Entry]]) -> None:
    """ValueError unless all scales are finite and positive."""
    from safetensors import safe_open

    of_file = defaultdict(list)
    for name, (entry, *_) in tensors.items():
        if name.endswith(SCALE):
            of_file[entry.file].append(name)
    for file, names in of_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                scales = opened.get_tensor(name).float()
                wrong = scales[~((scales > 0) & scales.isfinite())]
                if wrong.numel():
                    raise ValueError(
                        f"{folder / file}: {name} has {wrong.numel()} scales such as "
                        f"{wrong[0].item()}: allowed are finite positive numbers"
                    )


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file, {} if there is no file or another kind of content.

    Raises:
        ValueError: the file is not JSON.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return content if isinstance(content, dict) else {}
