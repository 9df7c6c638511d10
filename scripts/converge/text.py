"""The text of the paired runs, as tokens in one file.

    python scripts/converge/text.py FOLDER OUT.npz

FOLDER is what scripts/prepare_data.py has made: a corpus and a tokenizer of at most 65,536 tokens.
OUT.npz holds

    train       uint16, (tokens,): the training text, in the order of the corpus
    held_out    uint16, (tokens,): the first HELD_OUT tokens of the held-out text
    vocabulary  the number of tokens that there are
    end         the token that ends a piece of text

Each piece of text begins and ends with a token of its own.
"""

import argparse
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT = 2**19 + 1  # and so 2**19 labels
PIECES = 4096  # tokenized at once


class Text(NamedTuple):
    """What OUT.npz holds; `digest` tells one text from another."""

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int
    end: int
    digest: int


def read(path: Path) -> Text:
    """Raises ValueError for a file that text.py has not written."""
    try:
        with np.load(path) as file:
            train, held_out = file["train"], file["held_out"]
            numbers = int(file["vocabulary"]), int(file["end"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: {error!r}: scripts/converge/text.py makes such a file (docs/convergence.md)"
        ) from None
    digest = zlib.crc32(held_out.tobytes(), zlib.crc32(train.tobytes()))
    return Text(train, held_out, *numbers, digest)


def order(tokens: int, seq_len: int, needed: int, seed: int) -> np.ndarray:
    """(needed,): the numbers of the sequences that the run `seed` reads, each at most once.

    Sequence i begins at token i * seq_len and ends with the first token of the next one, its last
    label.

    Raises:
        ValueError: the text is too short to be read only once.
    """
    there = (tokens - 1) // seq_len
    if there < needed:
        raise ValueError(
            f"the text has {there:,} sequences of {seq_len:,} tokens, and a run reads {needed:,}: "
            "lower training.steps, or make a longer text"
        )
    return np.random.default_rng(seed).permutation(there)[:needed]


def write(folder: Path, out: Path) -> str:
    """Writes OUT.npz, and says what it holds."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    if (vocabulary := tokenizer.get_vocab_size()) > 2**16:
        raise ValueError(f"{folder}/tokenizer has {vocabulary:,} tokens: allowed are 65,536")
    config = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())
    begin, end = (tokenizer.token_to_id(config[name]) for name in ("bos_token", "eos_token"))

    def tokens_of(part: str) -> Iterator[np.ndarray]:
        with (folder / "corpus" / part / "text.jsonl").open(encoding="utf-8") as file:
            pieces = [json.loads(line)["text"] for line in file]
        for first in range(0, len(pieces), PIECES):
            encoded = tokenizer.encode_batch(
                pieces[first : first + PIECES], add_special_tokens=False
            )
            yield np.array([i for e in encoded for i in (begin, *e.ids, end)], dtype=np.uint16)

    train, held_out = (np.concatenate([*tokens_of(part)]) for part in ("train", "validation"))
    held_out = held_out[:HELD_OUT]
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, train=train, held_out=held_out, vocabulary=vocabulary, end=end)
    size = out.stat().st_size / 2**20
    return f"{out}: {len(train):,} tokens, {len(held_out):,} held out, {size:.1f} MiB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="made by scripts/prepare_data.py")
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    args = parser.parse_args()
    print(write(args.folder, args.out))
