"""The configuration of the run whose checkpoint is exported: its TOML, or flags, or both."""

import sys
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import MODELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONFIG_FILE, _FLAVOR = "--job.config_file", "--model.flavor"


def job_config(checkpoint: str | Path, file: str | None, flags: list[str]) -> JobConfig:
    """torchtitan's JobConfig from the TOML `file` of the run, if given, and torchtitan's `flags`.

    Raises:
        ValueError: there is no such file, neither says which model the checkpoint has, or a value
            is not allowed.
    """
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"--config = {file}: no such file")
        flags = [_CONFIG_FILE, file, *flags]
    # torchtitan's command line takes --job.config-file for --job.config_file.
    given = {flag.partition("=")[0].replace("-", "_").replace("__", "--", 1) for flag in flags}
    if not given & {_CONFIG_FILE, _FLAVOR}:
        raise ValueError(
            "CHECKPOINT does not say which model it has: name the TOML of the run by --config, or "
            f"the model by --model.name and {_FLAVOR}{_hint(Checkpoint(checkpoint))}"
        )
    try:
        return ConfigManager().parse_args(flags)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config = {file}: {error}") from None
    except (ImportError, KeyError) as error:
        raise ValueError(f"--config = {file}: {error!r}") from None


def _hint(saved: Checkpoint) -> str:
    """Models of torchtitan with the dimensions of the checkpoint, for an error message."""
    embedding = saved.tensors.get("tok_embeddings.weight")
    layers = {name.split(".")[1] for name in saved.tensors if name.startswith("layers.")}
    flavors: list[tuple[str, Any]] = [
        (f"{name} {flavor}", args)
        for name in MODELS
        for flavor, args in get_train_spec(name).model_args.items()
    ]
    fitting = [
        name
        for name, args in flavors
        if embedding is not None
        and (args.vocab_size, args.dim, args.n_layers) == (*embedding.size, len(layers))
    ]
    return f"; it has the dimensions of {', '.join(fitting)}" if fitting else ""
