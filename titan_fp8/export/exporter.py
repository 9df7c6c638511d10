"""The export itself: checks, the plan of files, then one file after the other."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_fp8.export import files, hf_config, loaders
from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import Run
from titan_fp8.export.tensors import HFTensor, converted_parts, into_shards, plan_tensors

DEFAULT_SHARD_BYTES = 5 * 10**9


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: Any,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    fuse: bool = False,
    tp: int = 1,
    log: Callable[[str], None] = print,
) -> None:
    """Write the checkpoint of a run to the new folder `out`, in block-FP8.

    Files appear under their names once they are complete, config.json and the index last, so a
    folder without config.json is an incomplete export.

    Args:
        checkpoint: the folder of one step, such as outputs/checkpoint/step-1000.
        out: a folder that does not exist; its parent is created if need be.
        config: torchtitan's JobConfig of the run, for the model, the modules that are left out, the
            recipe, the sequence length and the tokenizer.
        shard_bytes: the most bytes of tensors in a file, unless one tensor has more.
        fuse: write what a loader would refuse or misread in high precision (loaders.py).
        tp: the degree of tensor parallelism with which vLLM or SGLang will load it.
        log: gets a line per file, and warnings.

    Raises:
        ValueError: the model, the checkpoint or a value in `config` cannot be exported.
        OSError: `out` exists or has too little space, or a file cannot be read or written.
            The messages of both say so if an incomplete `out` is left, as after a NaN was found.
    """
    out = Path(out)
    _check_can_be_created(out)
    saved = Checkpoint(checkpoint)
    run = Run(config)
    tensors = plan_tensors(run, saved)
    notes = [f"warning: {warning}" for warning in (*run.warnings, *hf_config.warnings_of(run))]
    if fuse:
        tensors, left = loaders.fused(run, tensors, tp)
        notes += [f"in high precision because of --fuse: {left}"] if left else []
    notes += [f"warning: {warning}" for warning in loaders.warnings_of(run, tensors, tp)]
    if not any(tensor.quantized for tensor in tensors):
        raise ValueError(
            f"{run.name} {run.flavor} has no weight to export in FP8: the sizes of all are no "
            "multiples of 16 (with --fuse, of 128), or the config leaves them out"
        )
    model_config = hf_config.content(run, tensors)
    for note in notes:
        log(note)

    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(out, sum(tensor.nbytes for tensor in tensors))
    out.mkdir()
    try:
        _write(out, run, saved, tensors, model_config, shard_bytes, log)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"OUT = {out} is incomplete, delete it: {error}") from error


def _write(
    out: Path,
    run: Run,
    saved: Checkpoint,
    tensors: list[HFTensor],
    model_config: dict[str, Any],
    shard_bytes: int,
    log: Callable[[str], None],
) -> None:
    """Write all files into the folder `out`."""
    total = sum(tensor.nbytes for tensor in tensors)
    for source in run.tokenizer_files:
        with files.replacing(out / source.name) as partial:
            partial.write_bytes(source.read_bytes())

    shards = into_shards(tensors, shard_bytes)
    names = [files.shard_name(i, len(shards)) for i in range(len(shards))]
    start, done = time.monotonic(), 0
    for name, shard in zip(names, shards, strict=True):
        files.write_safetensors(out / name, shard, converted_parts(shard, run, saved, shard_bytes))
        done += sum(tensor.nbytes for tensor in shard)
        seconds = time.monotonic() - start
        log(f"{name}: {_size(done)} of {_size(total)} in {seconds:.0f} s")
    files.write_index(out, dict(zip(names, shards, strict=True)))
    files.write_json(out / files.CONFIG, model_config)
    fp8 = sum(tensor.quantized for tensor in tensors)
    log(f"{out}: {fp8} weights in FP8, {len(tensors) - fp8} tensors in high precision")


def _check_can_be_created(out: Path) -> None:
    if os.path.lexists(out):
        has_config = (out / files.CONFIG).exists()
        incomplete = "" if has_config else f", without {files.CONFIG}: not a complete export"
        raise FileExistsError(
            f"OUT = {out} exists{incomplete}; name a new folder or delete this one"
        )
    ancestor = next(parent for parent in out.parents if parent.exists())
    if not ancestor.is_dir():
        raise NotADirectoryError(f"OUT = {out} cannot be created: {ancestor} is a file")


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OSError(f"OUT = {out} needs {_size(needed)}, and {out.parent} has {_size(free)} left")


def _size(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.1f} {name}"
