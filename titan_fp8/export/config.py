"""The configuration of the run whose checkpoint is exported: its TOML, or flags, or both."""

import dataclasses
import sys
import types
import typing
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

_CONFIG_FILE, _FLAVOR = "--job.config_file", "--model.flavor"
_MODULE = "job.custom_config_module"


def job_config(checkpoint: str | Path, file: str | None, flags: list[str]) -> JobConfig:
    """torchtitan's JobConfig from the TOML `file` of the run, if given, and torchtitan's `flags`.

    Raises:
        ValueError: there is no such file, neither says which model the checkpoint has, or a value
            is not allowed.
    """
    if file is not None:
        flags = [_CONFIG_FILE, file, *flags]
    given: dict[str, str] = {}
    for flag, following in zip(flags, [*flags[1:], ""]):
        name, is_set, value = flag.partition("=")
        # torchtitan's command line takes --job.config-file for --job.config_file.
        given.setdefault(
            name.replace("-", "_").replace("__", "--", 1), value if is_set else following
        )
    content = _read(given[_CONFIG_FILE]) if _CONFIG_FILE in given else {}
    if not given.keys() & {_CONFIG_FILE, _FLAVOR}:
        raise ValueError(
            "CHECKPOINT does not say which model it has: name the TOML of the run by --config, or "
            f"the model by --model.name and {_FLAVOR}{_hint(Checkpoint(checkpoint))}"
        )
    # As torchtitan does next, whose error would not name the key.
    import_named(_MODULE, given.get(f"--{_MODULE}") or content.get("job", {}).get(_MODULE[4:]))
    try:
        return ConfigManager().parse_args(flags)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"--config = {file}: {error!r}") from error


def _read(file: str) -> dict[str, Any]:
    """The TOML. ValueError if it is none, or has values of other types than torchtitan's."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--config = {file}: no such file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_types("", content, JobConfig)
    except ValueError as error:
        raise ValueError(f"--config = {file}: {error}") from None
    return content


def _check_types(section: str, content: dict[str, Any], settings: type) -> None:
    """ValueError if a setting has a value of another type; torchtitan takes any.

    Settings that torchtitan does not know, such as titan_fp8's own, are not checked here.
    """
    hints = typing.get_type_hints(settings)
    for key, value in content.items():
        hint, name = hints.get(key, Any), f"{section}{key}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{name} = {value!r}: allowed is a section, [{name}]")
            _check_types(f"{name}.", value, typing.cast(type, hint))
        elif not _fits(value, hint):
            allowed = str(hint) if typing.get_args(hint) else hint.__name__
            allowed = allowed.removeprefix("typing.")
            raise ValueError(f"{name} = {value!r}: allowed is {allowed}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of a TOML has the type `hint`, of those that torchtitan's settings have."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return value in args
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if kind is list:
        return isinstance(value, list) and all(_fits(element, args[0]) for element in value)
    if hint is Any or kind is not None:
        return True
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


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
