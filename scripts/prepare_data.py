"""Makes a corpus and a tokenizer from Python's standard library; nothing is downloaded.

    <out>/corpus/train/text.jsonl        one {"text": ...} per line, as torchtitan's "c4_test" reads
    <out>/corpus/validation/text.jsonl   a twentieth of the source files, not in train
    <out>/tokenizer/tokenizer.json       byte-level BPE with 512 tokens
    <out>/tokenizer/tokenizer_config.json

Source files are cut into pieces of about 400 characters, which are sorted by their digest. To
training this order is random, but it is the same on every machine. So a batch mixes text from many
files, and all data-parallel ranks, each of which reads one stretch of the corpus, see the same kind
of text. The debug models have a vocabulary of 2048; with 512 tokens each token occurs more often,
and more is learnt in a hundred steps.

The result depends only on the Python version and on this file. <out>/stamp records both and is
written last; if it matches, nothing is done.
"""

import argparse
import fcntl
import hashlib
import json
import shutil
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
VALIDATION_EVERY = 20
PIECE = 400  # characters
# Folders that are not part of the standard library or not installed everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
LEFT_OUT |= {"encodings", "pydoc_data"}  # tables and documentation, not code


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def library_files() -> list[str]:
    """The text of the standard library's modules, ordered by the digest of their path."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    names = [name for name in names if LEFT_OUT.isdisjoint(name.parts)]
    names.sort(key=lambda name: digest(name.as_posix()))
    return [(library / name).read_text(encoding="utf-8", errors="replace") for name in names]


def shuffled_pieces(texts: list[str]) -> list[str]:
    """Cut texts at the first line end after PIECE characters, and sort the pieces by digest."""
    pieces = []
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start + PIECE) + 1 or len(text)
            pieces.append(text[start:end])
            start = end
    return sorted(pieces, key=digest)


def recipe() -> str:
    """The Python version and this file's digest, which determine the result."""
    return f"Python {sys.version.split()[0]}, {digest(Path(__file__).read_text()).hex()}\n"


def write_corpus(texts: list[str], folder: Path) -> None:
    """Write texts as JSON lines, one document per line; the folder is a data set."""
    folder.mkdir(parents=True)
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")


def write_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer of exactly VOCAB_SIZE tokens on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        sys.exit(f"prepare_data: only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} tokens learnt")
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def prepare(out: Path) -> None:
    """Fill the folder `out`, unless its stamp says that it is up to date."""
    stamp = out / "stamp"
    if stamp.exists() and stamp.read_text() == recipe():
        print(f"data: {out} is prepared")
        return
    files = library_files()
    train = shuffled_pieces([text for i, text in enumerate(files) if i % VALIDATION_EVERY])
    validation = shuffled_pieces(files[::VALIDATION_EVERY])
    for name in ("corpus", "tokenizer"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_corpus(train, out / "corpus" / "train")
    write_corpus(validation, out / "corpus" / "validation")
    write_tokenizer(train, out / "tokenizer")
    stamp.write_text(recipe())
    megabytes = sum(len(text) for text in files) / 1e6
    print(f"data: {len(files)} files of the standard library, {megabytes:.1f} MB, in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the offline corpus and tokenizer.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("data"), help="folder to fill")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several launches may run at once
        prepare(out)


if __name__ == "__main__":
    main()
