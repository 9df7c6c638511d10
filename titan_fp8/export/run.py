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
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.modules.linear import DEFAULT_FILTER_FQNS, FP8Linear, convert_linears
from titan_fp8.recipe import RECIPES
from titan_fp8.torchtitan_0_2.config import custom_import, experts_recipe
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts, convert_experts

MODELS = ("llama3", "qwen3", "deepseek_v3")

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


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
        if self.name not in MODELS:
            allowed = ", ".join(map(repr, MODELS))
            raise ValueError(f"model.name = {self.name!r}: allowed are {allowed}")
        spec: Any = get_train_spec(self.name)
        if self.flavor not in spec.model_args:
            allowed = ", ".join(map(repr, spec.model_args))
            raise ValueError(
                f"model.flavor = {self.flavor!r}: allowed for {self.name} are {allowed}"
            )
        self.args: Any = copy.deepcopy(spec.model_args[self.flavor])
        self.flavor_seq_len = self.args.max_seq_len
        self.args.update_from_config(config)
        self.tied = getattr(self.args, "enable_weight_tying", False)
        self.dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        self._adapter: Any = spec.state_dict_adapter(self.args, None)

        with torch.device("meta"):
            model: nn.Module = spec.model_cls(self.args)
        self.state: dict[str, Tensor] = model.state_dict()
        self.buffers = {name for name, _ in model.named_buffers()}
        linear, grouped = _section(config, "linear"), _section(config, "grouped_mm")
        self._read_modules(model, linear, grouped)
        self.scale_fmt = self._format_of(
            {
                "linears": linear and linear.recipe,
                "experts": grouped and experts_recipe(config.quantize),
            }
        )
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

    def _read_modules(self, model: nn.Module, linear: Any, grouped: Any) -> None:
        """Converts the model, to see which modules are converted."""
        linears = {name for name, m in model.named_modules() if type(m) is nn.Linear}
        experts = {name.rpartition(".")[0] for name, t in self.state.items() if t.dim() == 3}
        self.filter_fqns = list(linear.filter_fqns if linear else DEFAULT_FILTER_FQNS)
        convert_linears(model, filter_fqns=self.filter_fqns)
        if experts:
            convert_experts(model, fqns=grouped.fqns if grouped else ["experts"])
        converted = (FP8Linear, FP8GroupedExperts)
        self.linears = self._weights(linears | experts)
        self.quantized = self._weights(
            {name for name, module in model.named_modules() if isinstance(module, converted)}
        )

    def _format_of(self, recipes: Mapping[str, str | None]) -> str:
        """The format of the scales. Warns of recipes whose GEMMs read other weights.

        `recipes` has those of linears and of experts, None without a converter. Only those of
        weights in `quantized` count.
        """
        stacked = {self.state[name].dim() == 3 for name in self.quantized}
        used = {kind: name for kind, name in recipes.items() if (kind == "experts") in stacked}
        formats = {name: r.scale_fmt for name, r in RECIPES.items() if r.has_weight_blocks}
        compare = "compare the exported model's loss with the run's"
        for name in dict.fromkeys(used.values()):
            if name not in formats:
                what = f'recipe "{name}"' if name else "no converter of titan_fp8"
                who = " and ".join(kind for kind in used if used[kind] == name)
                self.warnings.append(
                    f"the run has {what} for {who}, whose GEMMs did not read weights quantized in "
                    f"128x128 blocks, as they are exported: {compare}"
                )
        in_blocks = {kind: name for kind, name in used.items() if name in formats}
        found = {formats[name] for name in in_blocks.values() if name}
        if len(found) > 1:
            uses = " and ".join(f'"{name}" for {kind}' for kind, name in in_blocks.items())
            self.warnings.append(
                f"the run has recipes {uses}, whose scales have different formats, and an export "
                f"has one: all its scales are FP32; {compare}"
            )
        return found.pop() if len(found) == 1 else "fp32"

    def _weights(self, modules: set[str]) -> set[str]:
        return {
            name
            for name, tensor in self.state.items()
            if tensor.dim() >= 2 and name.rpartition(".")[0] in modules
        }

    def _read_tokenizer(self, folder: Path) -> None:
        self.bos_id = self.eos_id = None
        files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
        self.tokenizer_files = files
        vocabulary = next((f for f in files if f.name.startswith(("tokenizer.", "vocab"))), None)
        if vocabulary is None:
            self.warnings.append(
                f"model.hf_assets_path = {str(folder)!r} has no tokenizer: the export will have "
                "none, and no bos_token_id and eos_token_id in its config.json"
            )
            return
        tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
        try:
            for read in (str(file) for file in files if file.suffix == ".json"):
                json.loads(Path(read).read_bytes())
            read = str(vocabulary)
            if vocabulary.stem == "vocab" and folder / "merges.txt" in files:
                read += f" or {folder / 'merges.txt'}"
            HuggingFaceTokenizer.__init__(tokenizer, str(folder))
        except OSError:
            raise
        except Exception as error:  # the tokenizers package raises no other class
            if hasattr(tokenizer, "tokenizer"):  # It has the vocabulary, and reads its settings.
                read = str(folder / "tokenizer_config.json")
            raise ValueError(f"{read}: {error}") from error
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id


def _section(config: Any, name: str) -> Any:
    """[quantize.<name>.titan_fp8] of a run that loads the plugin; None of any other."""
    if f"quantize.{name}.titan_fp8" not in config.model.converters:
        return None
    return getattr(getattr(config.quantize, name), "titan_fp8", None)
