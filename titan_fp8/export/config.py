"""The configuration of the run whose checkpoint is exported: its TOML, or flags, or both."""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import MODELS
from titan_fp8.torchtitan_0_2.config import import_named

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def job_config(checkpoint: str | Path, file: str | None, flags: list[str]) -> JobConfig:
    """torchtitan's JobConfig from the TOML `file` of the run, if given, and torchtitan's `flags`.

    Raises:
        ValueError: there is no such file, neither says which model the checkpoint has, or a value
            is not allowed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model.flavor", dest="flavor")
    # Both spellings are torchtitan's.
    parser.add_argument("--job.custom_config_module", "--job.custom-config-module", dest="module")
    given, _ = parser.parse_known_args(flags)
    if file is None and given.flavor is None:
        raise ValueError(
            "CHECKPOINT does not say which model it has: name the TOML of the run by --config, or "
            f"the model by --model.name and --model.flavor{_hint(Checkpoint(checkpoint))}"
        )
    module = given.module
    try:
        if file is not None:
            flags = ["--job.config_file", file, *flags]
            content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
            _check_types("", content, JobConfig)
            module = module or content.get("job", {}).get("custom_config_module")
    except FileNotFoundError:
        raise ValueError(f"--config = {file}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--config = {file}: {error}") from None
    # As torchtitan does next, whose error would not name the key.
    import_named("job.custom_config_module", module)
    try:
        return ConfigManager().parse_args(flags)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"--config = {file}: {error!r}") from error


def _check_types(section: str, content: Mapping[str, Any], settings: type) -> None:
    """ValueError if a setting has a value of another type; torchtitan takes any.

    Settings that torchtitan does not know, such as titan_fp8's own, are not checked here.
    """
    hints = typing.get_type_hints(settings)
    for key in filter(hints.__contains__, content):
        value, hint, name = content[key], hints[key], f"{section}{key}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{name} = {value!r}: allowed is a section, [{name}]")
            _check_types(f"{name}.", value, typing.cast(type, hint))
        elif not _fits(value, hint):
            allowed = str(hint) if typing.get_args(hint) else hint.__name__
            raise ValueError(f"{name} = {value!r}: allowed is {allowed.removeprefix('typing.')}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of a TOML has the type `hint`, of those that torchtitan's settings have."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return value in args
    if kind is list:
        return isinstance(value, list) and all(_fits(element, args[0]) for element in value)
    if args:
        return any(_fits(value, arg) for arg in args)
    return type(value) in ((int, float) if hint is float else (hint,))  # true is no int


def _hint(saved: Checkpoint) -> str:
    """Models of torchtitan with the dimensions of the checkpoint, for an error message."""
    if (embedding := saved.tensors.get("tok_embeddings.weight")) is None:
        return ""
    layers = {name.split(".")[1] for name in saved.tensors if name.startswith("layers.")}
    fitting = []
    for name in MODELS:
        for flavor, args in get_train_spec(name).model_args.items():
            model: Any = args
            if (model.vocab_size, model.dim, model.n_layers) == (*embedding.size, len(layers)):
                fitting.append(f"{name} {flavor}")
    return f"; it has the dimensions of {', '.join(fitting)}" if fitting else ""
