"""Block-FP8 Hugging Face checkpoints, such as exports, as `checkpoint.initial_load_path`.

torchtitan reads them with `initial_load_in_hf` and `initial_load_in_hf_quantized`, but only its
adapter of deepseek_v3 has a reader that multiplies by the scales. The adapters of other models warn
and copy the FP8 values without their scales, and so does that of deepseek_v3 without the second
flag.

That reader multiplies blocks of 128 x 128 of any `NAME.weight` by `NAME.weight_scale_inv`, if the
index has one, and copies whatever else it finds. So a checkpoint whose scales have other names, or
belong to other blocks, would be loaded with wrong values; `_fault` refuses it, and weights that are
quantized to integers, too. How activations are scaled (`activation_scheme`, `input_scale`) does not
matter for a run, which scales its own.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from titan_fp8.layouts import BLOCK, cdiv

QUANTIZED = "checkpoint.initial_load_in_hf_quantized"
INDEX = "model.safetensors.index.json"
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
ANY_SCALE = ".weight_scale"  # how names of scales go on after the module's, in all formats
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
SCALE_DTYPES = ("F32", "BF16", "F16")


class _Entry(NamedTuple):
    """A tensor of a safetensors file, by its header: safetensors' name of the dtype, the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("F8_")


_Tensors = Mapping[str, list[_Entry]]
"""The tensors of all safetensors files by name; a name may be in several files."""


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
            folder = Path(checkpoint_id)
            tensors, index = _headers(folder), _weight_map(folder / INDEX)
            _check_model(folder, tensors, index, lambda: self.sd_adapter.to_hf(state_dict))
            if _check_fp8(folder, tensors, index):
                if not from_quantized:
                    raise ValueError(
                        f"{checkpoint_id} has FP8 weights (quantization_config in its config.json),"
                        f" and {QUANTIZED} = false would load them without their scales: set it to "
                        "true"
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


def _headers(folder: Path) -> _Tensors:
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


def _weight_map(file: Path) -> Mapping[str, str]:
    """The file of each tensor by the index, {} if there is no index."""
    value = _read_json(file).get("weight_map", {})
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise ValueError(
            f"{file}: weight_map = {short(value)}: allowed is an object with the name of a file "
            "for each tensor"
        )
    return value


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file, {} if there is no file. ValueError if it is no object."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is {short(content)}: allowed is an object")
    return content


def _check_model(
    folder: Path,
    tensors: _Tensors,
    index: Mapping[str, str],
    state_dict: Callable[[], Mapping[str, torch.Tensor]],
) -> None:
    """ValueError if a file that the model needs is missing, or has integers for its floats.

    `state_dict` returns the model's by the names of the files. It is called only if need be.
    """
    integers = {
        name: entry
        for name, entries in tensors.items()
        for entry in entries
        if entry.dtype not in PLAIN_DTYPES and not entry.is_fp8
    }
    lost = {n: f for n, f in index.items() if n not in tensors and not (folder / f).is_file()}
    model = state_dict() if integers or lost else {}
    for name, file in lost.items():
        if _weight_of(name) in model:
            raise ValueError(f"{folder / file} is missing: {INDEX} has {name} in it")
    for name, entry in integers.items():
        if name in model and model[name].is_floating_point():
            raise ValueError(
                f"{folder / entry.file}: {name} is in {entry.dtype}: allowed are F8_E4M3 with a "
                f"scale for each {BLOCK}x{BLOCK} block, and {', '.join(PLAIN_DTYPES)}"
            )


def _weight_of(name: str) -> str:
    """The name of the weight that a tensor is the scale of; its own, if it is no scale."""
    module, is_scale, _ = name.rpartition(ANY_SCALE)
    return module + WEIGHT if is_scale else name


def _check_fp8(folder: Path, tensors: _Tensors, index: Mapping[str, str]) -> bool:
    """Whether weights are quantized. All such are e4m3 with the scales that the reader expects.

    Raises:
        ValueError: they are not, or other weights have scales.
    """
    has_fp8 = any(entry.is_fp8 for entries in tensors.values() for entry in entries)
    file = folder / "config.json"
    config = _read_json(file).get("quantization_config")
    if config is None and not has_fp8 and not any(ANY_SCALE in name for name in tensors):
        return False
    left = _not_converted(file, config, "FP8" if has_fp8 else "quantized")
    if has_fp8 and not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has FP8 weights and no {INDEX}, by which their scales are found"
        )
    suffixed = defaultdict(list)
    for name in sorted(tensors):
        module, has_suffix, _ = name.rpartition(f"{WEIGHT}_")
        if has_suffix and not name.endswith(SCALE):
            suffixed[module].append(name)
    for name, (entry, *others) in sorted(tensors.items()):
        if ANY_SCALE in name or any(each.is_fp8 for each in (entry, *others)):
            where = f"{folder / entry.file}: {name}"
            if others:
                raise ValueError(f"{where} is in {others[0].file} as well: remove the older file")
            if index.get(name) != entry.file:
                raise ValueError(f"{where}: {INDEX} has it in {index.get(name) or 'no file'}")
            if fault := _fault(name, tensors, left, suffixed):
                raise ValueError(f"{where} {fault}")
    if not has_fp8:
        raise ValueError(
            f"{file} has a quantization_config, and no weight is in FP8: allowed are F8_E4M3 with "
            f"a scale for each {BLOCK}x{BLOCK} block, or no quantization_config"
        )
    _check_values(folder, tensors)
    return True


def _not_converted(file: Path, config: Any, what: str) -> list[str]:
    """The names of a config.json that are not in FP8.

    `config` is its quantization_config, and `what` says which weights the checkpoint has.

    Raises:
        ValueError: config.json has no quantization that the reader reverts.
    """
    if not isinstance(config, dict | None):
        raise ValueError(f"{file}: quantization_config = {short(config)}: allowed is an object")
    config = config or {}
    for key, allowed in (("quant_method", "fp8"), ("weight_block_size", [BLOCK, BLOCK])):
        if (value := config.get(key)) != allowed:
            raise ValueError(
                f"{file.parent} has {what} weights, and {key} = {value!r} in the "
                f"quantization_config of its config.json: only {allowed!r} can be read, DeepSeek's "
                "format; a folder without config.json is an incomplete export"
            )
    left: list[str] = []
    for key in ("ignored_layers", "modules_to_not_convert"):
        if (names := config.get(key)) is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{file}: quantization_config.{key} = {short(names)}: allowed is a list of names"
            )
        left = names or left
    return left


def _fault(name: str, tensors: _Tensors, left: list[str], suffixed: Mapping[str, list[str]]) -> str:
    """What is wrong with an FP8 weight or a scale, "" if nothing is; weights are checked first.

    Args:
        left: the names in config.json that are not in FP8.
        suffixed: tensors whose names go on after NAME.weight, other than the scales, by NAME.
    """
    weight = _weight_of(name)
    if weight not in tensors:
        return f"has no {weight} that it is the scale of"
    dtype, shape = tensors[weight][0][1:]
    if dtype != "F8_E4M3":
        what = "" if name == weight else "the scale of a weight "
        return f"is {what}in {dtype}: allowed is F8_E4M3"
    if not weight.endswith(WEIGHT) or len(shape) != 2:
        return (
            f"is in FP8 with shape {shape}: allowed are matrices that are called NAME{WEIGHT} and "
            f"have their scales in NAME{SCALE}"
        )
    module, blocks = weight.removesuffix(WEIGHT), tuple(cdiv(size, BLOCK) for size in shape)
    allowed = (
        f"allowed is {module}{SCALE} with shape {blocks}, one for each {BLOCK}x{BLOCK} block, in "
        f"{' or '.join(SCALE_DTYPES)}"
    )
    if name != weight:
        entry = tensors[name][0]
        is_right = entry.shape == blocks and entry.dtype in SCALE_DTYPES
        return "" if is_right else f"has shape {entry.shape} in {entry.dtype}: {allowed}"
    if listed := next((n for n in left if f".{n}." in f".{module}."), None):
        return f"is in FP8, and modules_to_not_convert in config.json has {listed!r}"
    if others := suffixed.get(module):
        return f"has {', '.join(others)}: {allowed}"
    return "" if f"{module}{SCALE}" in tensors else f"has no scales: {allowed}"


def _check_values(folder: Path, tensors: _Tensors) -> None:
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
