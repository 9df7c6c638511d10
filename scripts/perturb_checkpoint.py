"""Copies a model's checkpoint with every weight moved by one ulp, up or down at random.

    python scripts/perturb_checkpoint.py CHECKPOINT COPY [--seed N]

Both are folders of torch.distributed.checkpoint, as torchtitan's seed checkpoints are. An ulp is
that of the dtype in which a weight is stored; zeros stay. Two runs that start from the checkpoint
and from the copy differ by no more than rounding does, so the gap between them is that of two equal
runs.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name; SystemExit if it holds anything else."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    others = [key for key, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
    if others:
        sys.exit(f"perturb_checkpoint: {folder} holds more than a model: {', '.join(others[:3])}")
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def perturbed(x: Tensor, generator: torch.Generator) -> Tensor:
    """x with every element but zeros moved to a neighbor; integers unchanged."""
    if not x.is_floating_point():
        return x
    up = torch.randint(2, x.shape, generator=generator, dtype=torch.int8).bool()
    infinity = torch.full((), torch.inf, dtype=x.dtype)
    moved = torch.nextafter(x, torch.where(up, infinity, -infinity))
    return torch.where(x == 0, x, moved)


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the directions (default: 1)")
    args = parser.parse_args(argv)
    if not (args.checkpoint / ".metadata").is_file():
        parser.error(f"no checkpoint: {args.checkpoint}")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    generator = torch.Generator().manual_seed(args.seed)
    state = load(args.checkpoint)
    for key in sorted(state):
        state[key] = perturbed(state[key], generator)
    dcp.save(state, checkpoint_id=args.copy, no_dist=True)
    print(f"perturbed: {args.copy}, {len(state)} tensors")


if __name__ == "__main__":
    main()
