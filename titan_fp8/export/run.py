"""What an export needs to know about a run, from its JobConfig: the model and its names."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from titan_fp8.linear import DEFAULT_FILTER_FQNS, FP8Linear, convert_linears
from titan_fp8.recipe import BF16, RECIPES
from titan_fp8.torchtitan_0_2.config import custom_import, experts_recipe
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts, convert_experts

MODELS = ("llama3", "qwen3", "deepseek_v3")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_VOCABULARIES = ("tokenizer.", "vocab")


class Run:
    """The model of a run.

    Attributes:
        name, flavor: of the model, in torchtitan.
        args: the model's arguments, with what the config sets in them.
        flavor_seq_len: the flavor's own max_seq_len, before the config sets it.
        state: the tensors of the model's state dict by name, on the meta device.
        linears: names of the weights of linears and experts.
        filter_fqns: of the config, or the default.
        quantized: those that are exported in FP8, as a run with this config would convert them if
            it had both converters, with FP8 recipes.
        buffers: names of tensors that are no parameters and keep their dtype.
        dtype: in which the run computes, and of exported tensors that are not quantized.
        scale_fmt: the format of the scales, as in `titan_fp8.reference.scale_of`.
        tied: whether the output layer shares the weight of the embedding.
        bos_id, eos_id: of the tokenizer, None if there is none.
        tokenizer_files: the files to copy.
        warnings: what the user should know before the export.

    Raises:
        ValueError: the config's model cannot be exported.
    """

    def __init__(self, config: JobConfig):
        self.warnings: list[str] = []
        custom_import(config)
        if not 1 <= (length := config.training.seq_len) < 2**31:
            raise ValueError(f"training.seq_len = {length}: allowed are 1 to {2**31 - 1}")
        self.name, self.flavor = config.model.name, config.model.flavor
        spec = _spec(self.name, self.flavor)
        self.args: Any = copy.deepcopy(spec.model_args[self.flavor])
        self.flavor_seq_len = self.args.max_seq_len
        self.args.update_from_config(config)
        self.tied = getattr(self.args, "enable_weight_tying", False)
        self.dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        assert spec.state_dict_adapter is not None
        self._adapter: Any = spec.state_dict_adapter(self.args, None)

        with torch.device("meta"):
            model = spec.model_cls(self.args)
        assert isinstance(model, nn.Module)
        self.state: dict[str, Tensor] = model.state_dict()
        self.buffers = {name for name, _ in model.named_buffers()}
        self._read_modules(config, model)
        self.scale_fmt = self._read_recipes(config)
        self._read_tokenizer(Path(config.model.hf_assets_path))

    @property
    def description(self) -> str:
        return f"{self.name} {self.flavor}"

    def to_hf(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """The tensor or, of stacked experts, the tensors that Hugging Face's model has for one."""
        try:
            return self._adapter.to_hf({name: value})
        except KeyError:
            raise ValueError(
                f"{name}: torchtitan's adapter for {self.name} has no Hugging Face name for it, "
                "so the model cannot be exported"
            ) from None

    def _read_modules(self, config: Any, model: nn.Module) -> None:
        """Converts the model, to see which modules are converted."""
        linears = [name for name, m in model.named_modules() if type(m) is nn.Linear]
        section = _section(config, "linear")
        self.filter_fqns = list(DEFAULT_FILTER_FQNS if section is None else section.filter_fqns)
        convert_linears(model, filter_fqns=self.filter_fqns)
        experts = {name.rpartition(".")[0] for name, t in self.state.items() if t.dim() == 3}
        if experts:
            section = _section(config, "grouped_mm")
            convert_experts(model, fqns=["experts"] if section is None else section.fqns)
        converted = (FP8Linear, FP8GroupedExperts)
        names = {name for name, module in model.named_modules() if isinstance(module, converted)}
        self.linears = self._weights({*linears, *experts})
        self.quantized = self._weights(names)

    def _read_recipes(self, config: Any) -> str:
        """The format of the scales. Warns of recipes whose GEMMs read other weights.

        Only recipes of weights in `quantized` count.
        """
        kinds = {"experts" if self.state[name].dim() == 3 else "linears" for name in self.quantized}
        linear, grouped = _section(config, "linear"), _section(config, "grouped_mm")
        recipes = {
            "linears": None if linear is None else linear.recipe,
            "experts": None if grouped is None else experts_recipe(config.quantize),
        }
        users: dict[str | None, list[str]] = {}
        for kind in sorted(kinds, reverse=True):
            users.setdefault(recipes[kind], []).append(kind)

        uses, formats = [], set()
        compare = "compare the exported model's loss with the run's"
        for name, modules in users.items():
            who = " and ".join(modules)
            recipe = None if name in (None, BF16) else RECIPES[name]
            if recipe is not None and recipe.has_weight_blocks:
                uses.append(f'"{name}" for {who}')
                formats.add(recipe.scale_fmt)
                continue
            what = "no converter of titan_fp8" if name is None else f'recipe "{name}"'
            self.warnings.append(
                f"the run has {what} for {who}, whose GEMMs did not read weights quantized in "
                f"128x128 blocks, as they are exported: {compare}"
            )
        if len(formats) > 1:
            self.warnings.append(
                f"the run has recipes {' and '.join(uses)}, whose scales have different formats, "
                f"and an export has one: all its scales are FP32; {compare}"
            )
        return formats.pop() if len(formats) == 1 else "fp32"

    def _weights(self, modules: set[str]) -> set[str]:
        return {
            name
            for name, tensor in self.state.items()
            if tensor.dim() >= 2 and name.rpartition(".")[0] in modules
        }

    def _read_tokenizer(self, folder: Path) -> None:
        self.bos_id = self.eos_id = None
        self.tokenizer_files = [
            folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()
        ]
        if any(file.name.startswith(_VOCABULARIES) for file in self.tokenizer_files):
            tokenizer = _tokenizer(folder, self.tokenizer_files)
            self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id
        else:
            self.warnings.append(
                f"model.hf_assets_path = {str(folder)!r} has no tokenizer: the export will have "
                "none, and no bos_token_id and eos_token_id in its config.json"
            )


def _tokenizer(folder: Path, files: list[Path]) -> HuggingFaceTokenizer:
    """torchtitan's tokenizer.

    Raises:
        ValueError: a file is damaged. The message names it.
    """
    for file in files:
        if file.suffix == ".json":
            try:
                json.loads(file.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: {error}") from None
    tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    try:
        HuggingFaceTokenizer.__init__(tokenizer, str(folder))
    except OSError:
        raise
    except Exception as error:  # the tokenizers package raises no other class
        read = [next(file for file in files if file.name.startswith(_VOCABULARIES))]
        if hasattr(tokenizer, "tokenizer"):  # It has the vocabulary, and then reads its settings.
            read = [folder / "tokenizer_config.json"]
        elif read[0].stem == "vocab":
            read += [file for file in files if file.name == "merges.txt"]
        raise ValueError(f"{' or '.join(map(str, read))}: {error}") from error
    return tokenizer


def _spec(name: str, flavor: str) -> TrainSpec:
    if name not in MODELS:
        raise ValueError(f"model.name = {name!r}: allowed are {', '.join(map(repr, MODELS))}")
    spec = get_train_spec(name)
    if flavor not in spec.model_args:
        allowed = ", ".join(map(repr, spec.model_args))
        raise ValueError(f"model.flavor = {flavor!r}: allowed for {name} are {allowed}")
    return spec


def _section(config: Any, name: str) -> Any:
    """[quantize.<name>.titan_fp8] of a run that loads the plugin; None of any other."""
    if f"quantize.{name}.titan_fp8" not in config.model.converters:
        return None
    return getattr(getattr(config.quantize, name), "titan_fp8", None)
