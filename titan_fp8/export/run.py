"""What an export needs to know about a run: its JobConfig, the model and its names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig

from titan_fp8.modules.linear import DEFAULT_FILTER_FQNS, FP8Linear, convert_linears
from titan_fp8.recipe import RECIPES
from titan_fp8.torchtitan_0_2.config import custom_import, experts_recipe, model_of
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts, convert_experts

MODELS = ("llama3", "qwen3", "deepseek_v3")

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def job_config(file: str | None, flags: list[str]) -> JobConfig:
    """torchtitan's JobConfig from the TOML `file` of the run, if given, and torchtitan's `flags`.

    Raises:
        ValueError: neither says which model the checkpoint has, or torchtitan refuses them.
    """
    if file is None and not any(flag.startswith("--model.flavor") for flag in flags):
        raise ValueError(
            "CHECKPOINT does not say which model it has: name the TOML of the run by --config, or "
            "the model by --model.name and --model.flavor"
        )
    of_file = [] if file is None else ["--job.config_file", file]
    try:
        return ConfigManager().parse_args([*of_file, *flags])
    except Exception as error:
        what = str(error) if isinstance(error, ValueError | OSError) else repr(error)
        raise ValueError(what if file is None else f"--config = {file}: {what}") from error


class Run:
    """The model of a run.

    Attributes:
        name, args: torchtitan's; the arguments have what the config sets in them.
        flavor_seq_len: the flavor's own max_seq_len, before the config sets it.
        state: the tensors of the model's state dict by name, on the meta device.
        linears: names of the weights of linears and experts.
        quantized: those that are exported in FP8, as a run with this config would convert them if
            it had both converters, with FP8 recipes.
        buffers: names of tensors that are no parameters and keep their dtype.
        dtype: in which the run computes, and of exported tensors that are not quantized.
        scale_fmt: as in `titan_fp8.reference.scale_of`.
        tied: whether the output layer shares the weight of the embedding.
        bos_id, eos_id: None without a tokenizer.
        tokenizer_files: the files to copy.
        warnings: what the user should know before the export.

    Raises:
        ValueError: the config's model cannot be exported.
    """

    def __init__(self, config: JobConfig):
        self.warnings: list[str] = []
        custom_import(config)
        training = config.training  # torchtitan takes values of any type from a TOML
        if type(length := training.seq_len) is not int or not 1 <= length < 2**31:
            raise ValueError(f"training.seq_len = {length}: allowed are 1 to {2**31 - 1}")
        if (dtype := training.mixed_precision_param) not in TORCH_DTYPE_MAP:
            allowed = ", ".join(map(repr, TORCH_DTYPE_MAP))
            raise ValueError(f"training.mixed_precision_param = {dtype!r}: allowed are {allowed}")
        self.name = config.model.name
        if self.name not in MODELS:
            allowed = ", ".join(map(repr, MODELS))
            raise ValueError(f"model.name = {self.name!r}: allowed are {allowed}")
        spec, self.args = model_of(config)
        self.description = f"{self.name} {config.model.flavor}"
        self.flavor_seq_len = spec.model_args[config.model.flavor].max_seq_len
        self.tied = getattr(self.args, "enable_weight_tying", False)
        self.dtype = TORCH_DTYPE_MAP[dtype]
        self._adapter: Any = spec.state_dict_adapter(self.args, None)

        with torch.device("meta"):
            model: nn.Module = spec.model_cls(self.args)
        self.state: dict[str, Tensor] = model.state_dict()
        self.buffers = {name for name, _ in model.named_buffers()}
        linear, grouped = _section(config, "linear"), _section(config, "grouped_mm")
        self._read_modules(model, linear, grouped)
        self.scale_fmt = self._format_of(
            linear and linear.recipe, grouped and experts_recipe(config)
        )
        self._read_tokenizer(Path(config.model.hf_assets_path))

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

        def weights(*kinds: type[nn.Module]) -> set[str]:
            found = {name for name, module in model.named_modules() if type(module) in kinds}
            return {
                n for n, t in self.state.items() if t.dim() > 1 and n.rpartition(".")[0] in found
            }

        experts = {name for name, tensor in self.state.items() if tensor.dim() == 3}
        self.linears = weights(nn.Linear) | experts
        convert_linears(model, filter_fqns=linear.filter_fqns if linear else DEFAULT_FILTER_FQNS)
        if experts:
            convert_experts(model, fqns=grouped.fqns if grouped else ["experts"])
        self.quantized = weights(FP8Linear, FP8GroupedExperts)

    def _format_of(self, linears: str | None, experts: str | None) -> str:
        """The format of the scales. Warns of recipes whose GEMMs read other weights.

        The recipes are None without a converter. Only those of weights in `quantized` count.
        """
        dims = {self.state[name].dim() for name in self.quantized}
        used = {"linears": linears} if 2 in dims else {}
        used |= {"experts": experts} if 3 in dims else {}
        formats = {name: r.scale_fmt for name, r in RECIPES.items() if r.has_weight_blocks}
        found = {formats[name] for name in used.values() if name in formats}
        exported = found.pop() if len(found) == 1 else "fp32"
        for name in dict.fromkeys(used.values()):
            if formats.get(str(name)) != exported:
                what = f'recipe "{name}"' if name else "no converter of titan_fp8"
                who = " and ".join(kind for kind in used if used[kind] == name)
                self.warnings.append(
                    f"the run has {what} for {who}, whose GEMMs did not read weights quantized in "
                    f"128x128 blocks with {exported} scales, as they are exported: compare the "
                    "exported model's loss with the run's"
                )
        return exported

    def _read_tokenizer(self, folder: Path) -> None:
        self.bos_id = self.eos_id = None
        files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
        self.tokenizer_files = files
        if not any(file.name.startswith(("tokenizer.", "vocab")) for file in files):
            self.warnings.append(
                f"model.hf_assets_path = {str(folder)!r} has no tokenizer: the export will have "
                "none, and no bos_token_id and eos_token_id in its config.json"
            )
            return
        try:
            tokenizer = HuggingFaceTokenizer(str(folder))
        except Exception as error:  # the tokenizers package raises no other class
            raise ValueError(f"model.hf_assets_path = {str(folder)!r}: {error}") from error
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id


def _section(config: Any, name: str) -> Any:
    """[quantize.<name>.titan_fp8] of a run that loads the plugin; None of any other."""
    if f"quantize.{name}.titan_fp8" not in config.model.converters:
        return None
    return getattr(getattr(config.quantize, name), "titan_fp8", None)
