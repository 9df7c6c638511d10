"""Block-FP8 Hugging Face checkpoints, such as exports, as `checkpoint.initial_load_path`.

torchtitan reads them with `initial_load_in_hf` and `initial_load_in_hf_quantized`, but only its
adapter of deepseek_v3 has a reader that multiplies by the scales. Other adapters, and that one
without the second flag, copy the FP8 values without their scales.

That reader multiplies blocks of 128 x 128 of any `NAME.weight` by `NAME.weight_scale_inv`, if the
index has one, and copies whatever else it finds. So a checkpoint whose scales have other names, or
belong to other blocks, would be loaded with wrong values; `_fault` refuses it, and weights that are
quantized to integers, too. How activations are scaled (`activation_scheme`, `input_scale`) does not
matter for a run, which scales its own.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_fp8.layouts import BLOCK, cdiv

INDEX = "model.safetensors.index.json"
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
ANY_SCALE = ".weight_scale"  # how names of scales go on after the module's, in all formats
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
SCALE_DTYPES = ("F32", "BF16", "F16")
ALLOWED = f"F8_E4M3 with a scale for each {BLOCK}x{BLOCK} block"


class _Entry(NamedTuple):
    """A tensor of a safetensors file, by its header: safetensors' name of the dtype, the shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def with_scales(load: Callable) -> Callable:
    """Wraps `CheckpointManager.dcp_load`: FP8 weights are loaded with their scales or not at all.

    The wrapped function raises ValueError where torchtitan would load the weights without scales,
    or with scales of another format, and where a file is missing or damaged.
    """

    @functools.wraps(load)
    def dcp_load(
        self: Any, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if from_hf:
            folder, adapter = Path(checkpoint_id), self.sd_adapter
            entries = _read_headers(folder)
            file = folder / INDEX
            index = _checked(_read_json(file).get("weight_map", {}), f"{file}: weight_map", dict)
            _check_model(folder, entries, index, lambda: adapter.to_hf(state_dict))
            if _check_fp8(folder, entries, index):
                if not from_quantized:
                    raise ValueError(
                        f"{folder} has FP8 weights (quantization_config in its config.json), and "
                        "checkpoint.initial_load_in_hf_quantized = false would load them without "
                        "their scales: set it to true"
                    )
                if type(adapter).get_hf_storage_reader is StateDictAdapter.get_hf_storage_reader:
                    # The reader that torchtitan's adapter of deepseek_v3 returns.
                    adapter.get_hf_storage_reader = lambda path, from_quantized: (
                        QuantizedHuggingFaceStorageReader(path, 4, torch.float32, BLOCK)
                    )
        load(self, state_dict, checkpoint_id, from_hf, from_quantized)

    return dcp_load


def _read_headers(folder: Path) -> list[_Entry]:
    """All tensors by name. ValueError if a file is damaged, or scales are not positive."""
    from safetensors import SafetensorError, safe_open  # as PyTorch does, when it is needed

    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    part = file.get_slice(name)
                    found.append(_Entry(name, path, part.get_dtype(), (*part.get_shape(),)))
                    if name.endswith(SCALE) and found[-1].dtype in SCALE_DTYPES:
                        scales = file.get_tensor(name).float()
                        if (wrong := scales[~((scales > 0) & scales.isfinite())]).numel():
                            raise ValueError(
                                f"{path}: {name} has {wrong.numel()} scales such as "
                                f"{wrong[0].item()}: allowed are finite positive numbers"
                            )
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from None
    return sorted(found)


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file, {} if there is no file."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    return _checked(content, str(file), dict, object)


def _checked(value: Any, where: str, kind: type, element: type = str) -> Any:
    """ValueError unless the value is an object (dict) or a list, and what is in it an `element`."""
    elements = value.values() if isinstance(value, dict) else value
    if not isinstance(value, kind) or not all(isinstance(each, element) for each in elements):
        allowed = ("an object" if kind is dict else "a list") + " of names" * (element is str)
        raise ValueError(f"{where} = {short(value)}: allowed is {allowed}")
    return value


def _check_model(
    folder: Path, entries: list[_Entry], index: Mapping[str, str], model: Callable[[], Mapping]
) -> None:
    """ValueError if a file that the model needs is missing, or has integers for its floats.

    `model` returns the model's tensors by their names in files; it is called only if need be.
    """
    faults = {
        name: f"{file}: {name} is in {dtype}: allowed are {ALLOWED}, and {', '.join(PLAIN_DTYPES)}"
        for name, file, dtype, _ in entries
        if dtype not in PLAIN_DTYPES and not dtype.startswith("F8_")
    }
    there = {entry.name for entry in entries}
    faults |= {
        name.replace(SCALE, WEIGHT): f"{folder / file} is missing: {INDEX} has {name} in it"
        for name, file in index.items()
        if name not in there and not (folder / file).is_file()
    }
    needed = model() if faults else {}
    for name, fault in faults.items():
        if name in needed and needed[name].is_floating_point():
            raise ValueError(fault)


def _check_fp8(folder: Path, entries: list[_Entry], index: Mapping[str, str]) -> bool:
    """Whether weights are quantized. All such are e4m3 with the scales that the reader expects.

    Raises:
        ValueError: they are not, or other weights have scales.
    """
    tensors = {entry.name: entry for entry in entries}
    fp8 = {entry.name for entry in entries if entry.dtype.startswith("F8_")}
    file = folder / "config.json"
    config = _read_json(file).get("quantization_config")
    if config is None and not fp8 and not any(ANY_SCALE in name for name in tensors):
        return False
    where = f"{file}: quantization_config"
    config = _checked({} if config is None else config, where, dict, object)
    for key, allowed in (("quant_method", "fp8"), ("weight_block_size", [BLOCK, BLOCK])):
        if (value := config.get(key)) != allowed:
            raise ValueError(
                f"{folder} has {'FP8' if fp8 else 'quantized'} weights, and {key} = {value!r} in "
                f"the quantization_config of its config.json: only {allowed!r} can be read, "
                "DeepSeek's format; a folder without config.json is an incomplete export"
            )
    left: list[str] = []
    for key in ("ignored_layers", "modules_to_not_convert"):
        left = _checked(config.get(key) or left, f"{where}.{key}", list)
    for entry in entries:
        name = entry.name
        module, is_suffixed, _ = name.rpartition(f"{WEIGHT}_")
        weight = module + WEIGHT if is_suffixed else name
        if weight not in fp8 and name not in fp8 and ANY_SCALE not in name:
            continue
        fault = _fault(name, weight, tensors, left)
        if (place := index.get(name)) != entry.file.name:
            fault = f"is in {place or 'no file'} by {INDEX}, by which scales are found"
        if fault:
            raise ValueError(f"{entry.file}: {name} {fault}")
    if not fp8:
        raise ValueError(
            f"{file} has a quantization_config, and no weight is in FP8: allowed are {ALLOWED}, or "
            "no quantization_config"
        )
    return True


def _fault(name: str, weight: str, tensors: Mapping[str, _Entry], left: list[str]) -> str:
    """What is wrong with an FP8 weight, or with a tensor called NAME.weight_..., "" if nothing is.

    `left` has the names in config.json that are not in FP8.
    """
    if weight not in tensors:
        return f"has no {weight} that it is the scale of"
    found, (_, _, dtype, shape) = tensors[name], tensors[weight]
    if dtype != "F8_E4M3":
        return f"is {'the scale of a weight ' * (name != weight)}in {dtype}: allowed is F8_E4M3"
    if not weight.endswith(WEIGHT) or len(shape) != 2:
        return (
            f"is in FP8 with shape {shape}: allowed are matrices that are called NAME{WEIGHT} and "
            f"have their scales in NAME{SCALE}"
        )
    module, blocks = weight.removesuffix(WEIGHT), tuple(cdiv(size, BLOCK) for size in shape)
    if name == weight:
        if listed := next((n for n in left if f".{n}." in f".{module}."), None):
            return f"is in FP8, and modules_to_not_convert in config.json has {listed!r}"
        fault = "" if module + SCALE in tensors else "has no scales"
    else:
        is_right = name.endswith(SCALE) and found.shape == blocks and found.dtype in SCALE_DTYPES
        fault = "" if is_right else f"has shape {found.shape} in {found.dtype}"
    return fault and (
        f"{fault}: allowed is {module}{SCALE} with shape {blocks}, one for each {BLOCK}x{BLOCK} "
        f"block, in {' or '.join(SCALE_DTYPES)}"
    )
