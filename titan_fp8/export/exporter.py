"""The export itself: checks, the plan of files, then one file after the other."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from safetensors import SafetensorError
from safetensors.torch import save_file

from titan_fp8.export import hf_config, loaders
from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import Run
from titan_fp8.export.tensors import into_shards, plan_tensors, values_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: Any,
    *,
    shard_bytes: int = 5 * 10**9,
    fuse: bool = False,
    tp: int = 1,
    log: Callable[[str], None] = print,
) -> None:
    """Write the checkpoint of a run to the new folder `out`, in block-FP8.

    Files appear under their names once they are complete, config.json last.

    Args:
        checkpoint: the folder of one step, such as outputs/checkpoint/step-1000.
        out: a folder that does not exist; its parent is created if need be.
        config: torchtitan's JobConfig of the run.
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
    if os.path.lexists(out):
        incomplete = "" if (out / CONFIG).exists() else f", without {CONFIG}: not a complete export"
        raise FileExistsError(
            f"OUT = {out} exists{incomplete}; name a new folder or delete this one"
        )
    saved = Checkpoint(checkpoint)
    run = Run(config)
    tensors = plan_tensors(run, saved)
    notes = [f"warning: {warning}" for warning in (*run.warnings, *hf_config.warnings_of(run))]
    if fuse:
        tensors, left = loaders.fused(run, tensors, tp)
        notes += [f"in high precision because of --fuse: {left}"] if left else []
    notes += [f"warning: {warning}" for warning in loaders.warnings_of(run, tensors, tp)]
    if not (fp8 := sum(tensor.quantized for tensor in tensors)):
        raise ValueError(
            f"{run.description} has no weight to export in FP8: the sizes of all are no "
            "multiples of 16 (with --fuse, of 128), or the config leaves them out"
        )
    model_config = hf_config.content(run, tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    total, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(out.parent).free
    if free < total:
        raise OSError(
            f"OUT = {out} needs {decimal(total)}, and {out.parent} has {decimal(free)} left"
        )
    out.mkdir()
    for note in notes:
        log(note)

    try:
        for source in run.tokenizer_files:
            with _replacing(out / source.name) as partial:
                partial.write_bytes(source.read_bytes())
        shards = into_shards(tensors, shard_bytes)
        start, done = time.monotonic(), 0
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, 1):
            name = f"model-{i:05}-of-{len(shards):05}.safetensors"
            # All of a file is in memory at once: safetensors cannot write one after the other.
            values = values_of(shard, run, saved, shard_bytes)
            with _replacing(out / name) as partial:
                save_file(values, partial, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(values, name)
            del values
            done += sum(tensor.nbytes for tensor in shard)
            seconds = time.monotonic() - start
            log(f"{name}: {decimal(done)} of {decimal(total)} in {seconds:.0f} s")
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        # PyTorch's reader of FP8 wants an index, even of one file.
        for name, content in ((INDEX, index), (CONFIG, model_config)):
            with _replacing(out / name) as partial:
                partial.write_text(json.dumps(content, indent=2) + "\n")
    except (OSError, SafetensorError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(f"OUT = {out} is incomplete, delete it: {error}") from error
    log(f"{out}: {fp8} weights in FP8, {len(tensors) - fp8} tensors in high precision")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` if the block raises nothing.

    So a file that has its final name is complete, even if the process is killed at any moment.
    """
    partial = path.with_name(path.name + PARTIAL)
    partial.touch(exist_ok=False)
    mode = partial.stat().st_mode
    yield partial
    partial.chmod(mode)  # safetensors writes a file of its own, which only its owner may read.
    partial.rename(path)
