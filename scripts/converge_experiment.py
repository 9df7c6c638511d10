"""A convergence experiment: its TOML, its text and the folder of its results."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converge_arms import ARMS, SETTINGS, Settings, read_settings, write_settings
from converge_jobs import LOG, ROOT, left_behind
from converge_stats import read_held_out
from tables import printable
from torchtitan.config import ConfigManager

from titan_fp8.recipe import BF16

try:
    import tomllib
except ImportError:
    import tomli as tomllib

CONFIGS = ROOT / "configs/convergence"
DATA_DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
DEGREES = (*DATA_DEGREES, "tensor_parallel_degree", "pipeline_parallel_degree")
DEGREES += ("context_parallel_degree",)
SEEDS = {n: f"seed_ulp_{n}" if n else "seed" for n in {arm.perturbed for arm in ARMS.values()}}
"""The folders of the checkpoints that arms start from, by `perturbed`."""


class BadArguments(Exception):
    """Arguments, a TOML, a text or earlier results that no experiment can be run with."""


@dataclass
class Experiment:
    """A model, its TOML and the folder of its results.

    Attributes:
        config: the TOML, with torchtitan's defaults and with the flags.
        checkpoints: whether arms start from a seed checkpoint and can be resumed.
    """

    toml: Path
    config: dict[str, Any]
    results: Path
    settings: Settings
    checkpoints: bool

    @property
    def ranks(self) -> int:
        return ranks_of(self.config)

    @property
    def deterministic(self) -> bool:
        return self.config["debug"]["deterministic"]

    @property
    def corpus(self) -> Path:
        return Path(self.config["training"]["dataset_path"])

    def folder(self, name: str) -> Path:
        return self.results / name

    def seed(self, perturbed: int) -> Path:
        return self.results / SEEDS[perturbed] / "checkpoint/step-0"

    def is_done(self, name: str) -> bool:
        return self.settings.steps in read_held_out(self.folder(name))


def ranks_of(config: dict[str, Any], degrees: tuple[str, ...] = DEGREES) -> int:
    return math.prod(config["parallelism"][degree] for degree in degrees)


def digest(*contents: bytes) -> str:
    total = hashlib.sha256()
    for content in contents:
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def texts(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).glob("*.jsonl"))
    if not found:
        raise BadArguments(
            f"no text in {folder}: scripts/prepare_data.py makes it (docs/convergence.md)"
        )
    return found


def read_experiment(args: argparse.Namespace) -> Experiment:
    """Reads the TOML and the text, and checks that the arms can run.

    Raises:
        BadArguments: they cannot.
    """
    toml = CONFIGS / f"{args.model}.toml"
    try:
        text = tomllib.loads(toml.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadArguments(f"{toml}: {error}") from None
    # As the jobs will read it. torchtitan exits with 2 after flags that it does not know.
    try:
        config = ConfigManager().parse_args(["--job.config_file", str(toml), *args.flags]).to_dict()
    except ValueError as error:
        raise BadArguments(str(error)) from None
    training, validation = config["training"], config["validation"]
    steps, every = args.steps or training["steps"], validation["freq"]
    if every < 1 or steps % every:
        raise BadArguments(f"{steps} steps are no multiple of validation.freq = {every}")
    if min(config["parallelism"][degree] for degree in DEGREES) < 1:
        raise BadArguments(f"{toml.name} must say every degree of parallelism, not -1")
    if not (args.no_checkpoints or config["checkpoint"]["enable"]):
        raise BadArguments("checkpoint.enable = false: use --no-checkpoints, before --")
    if not config["metrics"]["enable_tensorboard"]:
        raise BadArguments(
            "metrics.enable_tensorboard = false: the verdict reads TensorBoard files"
        )
    if config["debug"]["seed"] is None:
        raise BadArguments(
            f"{toml.name} must set debug.seed, or arms would start from other weights"
        )
    for name in args.arms:
        check_arm(name, config, steps)
    read = [*texts(training["dataset_path"]), *texts(validation["dataset_path"])]
    tokenizer = Path(config["model"]["hf_assets_path"]) / "tokenizer.json"
    batch = training["global_batch_size"]
    batch = batch if batch > 0 else training["local_batch_size"] * ranks_of(config, DATA_DEGREES)
    settings = Settings(
        model=args.model,
        steps=steps,
        warmup=steps // 10,
        every=every,
        tokens=batch * training["seq_len"],
        config=digest(json.dumps(text, sort_keys=True).encode()),
        text=digest(*(file.read_bytes() for file in read)),
        tokenizer=digest(tokenizer.read_bytes() if tokenizer.is_file() else b""),
        flags=[*args.flags, *(["--checkpoint.no_enable"] if args.no_checkpoints else [])],
    )
    results = (args.out or ROOT / "outputs/converge" / args.model).resolve()
    if str(results) != printable(results):
        raise BadArguments(f"--out {printable(results)}: TensorBoard reads only names in UTF-8")
    return Experiment(toml, config, results, settings, not args.no_checkpoints)


def check_arm(name: str, config: dict[str, Any], steps: int) -> None:
    """Raises BadArguments for an arm that this configuration cannot run."""
    arm, interval, dtype = ARMS[name], config["checkpoint"]["interval"], config["training"]["dtype"]
    experts = config["quantize"]["grouped_mm"].get("titan_fp8", {}).get("recipe")
    if experts not in (None, BF16):
        raise BadArguments(
            f"quantize.grouped_mm.titan_fp8.recipe = {experts!r} would be the recipe of experts in "
            f"every arm, bf16 ones too: leave it out, or say {BF16!r}"
        )
    if arm.rounding and dtype != "bfloat16":
        raise BadArguments(f"{name} needs training.dtype = 'bfloat16', not {dtype!r}")
    if arm.role == "resumed" and interval > steps // 2:
        raise BadArguments(
            f"{name} is killed in the middle of {steps} steps and needs a checkpoint before: "
            f"checkpoint.interval = {interval} must be at most {steps // 2}"
        )


def refuse_other_files(results: Path) -> None:
    """Raises BadArguments if files of others are where the jobs of an experiment write and delete.

    A results folder has SETTINGS from the start, and a job's folder has its log.
    """
    names = {path.name for path in results.iterdir()} - {"lock", f"{SETTINGS}.part"}
    if names and SETTINGS not in names:
        raise BadArguments(
            f"{results} is not empty and holds no experiment (no {SETTINGS}): name another --out"
        )
    for name in names & {*ARMS, *SEEDS.values()}:
        folder = results / name
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / LOG).is_file()):
            raise BadArguments(f"{folder} is not of this experiment (no {LOG}): move it away")


@contextlib.contextmanager
def opened(experiment: Experiment) -> Iterator[None]:
    """Makes the results folder, and keeps other calls of converge.sh from writing to it.

    Raises:
        BadArguments: the folder cannot be made, another call writes to it, it holds another
            experiment, or files that no experiment has written.
    """
    results, settings = experiment.results, experiment.settings
    try:
        results.mkdir(parents=True, exist_ok=True)
        refuse_other_files(results)
        file = (results / "lock").open("a")
    except OSError as error:
        raise BadArguments(f"--out {results}: {error.strerror}") from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadArguments(f"another converge.sh is writing to {results}") from None
        if pids := left_behind(results):
            raise BadArguments(
                f"jobs of a converge.sh that was killed are still writing to {results}: try again "
                f"when they have ended (processes {', '.join(map(str, pids))})"
            )
        before = read_settings(results)
        if before is None:
            try:
                write_settings(results, settings)
            except OSError as error:
                raise BadArguments(f"--out {results}: {error.strerror}") from None
        elif before != (settings if before.tokenizer else replace(settings, tokenizer="")):
            raise BadArguments(
                f"{results} holds an experiment with other settings: name another --out"
            )
        yield
