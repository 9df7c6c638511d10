"""Makes a corpus and a tokenizer from text on this machine; nothing is downloaded.

    python scripts/prepare_data.py [OUT] [--from DIR ...] [--vocab-size N] [--piece CHARACTERS]

    OUT/corpus/train/text.jsonl        one {"text": ...} per line, as torchtitan's "c4_test" reads
    OUT/corpus/validation/text.jsonl   the held-out part: whole files, none of them in train
    OUT/tokenizer/tokenizer.json       byte-level BPE, with 512 tokens by default
    OUT/tokenizer/tokenizer_config.json
    OUT/report.txt                     what the text is; it is printed, too

The text is Python's standard library: all its .py files, except those in the folders LEFT_OUT. With
--from it is the files below the named folders that are UTF-8 without zero bytes; empty files, files
over 256 KiB, which are mostly generated tables, copies of other files, links and files below OUT
are left out. The held-out part is a twentieth of the files.

Files are cut into pieces of about 400 characters, or as --piece says, which are sorted by their
hash. For training this order is as good as random, but it is the same on every machine: a batch
mixes text from many files, and all data-parallel ranks, each of which reads one stretch of the
corpus, see the same kind of text. The debug models have a vocabulary of 2048; with 512 tokens each
token occurs more often, and more is learned in a hundred steps.

The result depends only on what OUT/stamp records: the text, the names of the folders, the options,
the versions of Python and tokenizers, and this file. If the stamp, which is written last, matches
and no file is missing, nothing is done. Otherwise the files above are replaced, and no other file
in OUT is touched. A folder OUT with files, but without the lock of an earlier call, is refused, and
so is another file beside a text.jsonl, which torchtitan would read as text; hidden files are
allowed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NoReturn

import tokenizers
from tables import printable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARIES = range(258, 2**31)  # at least the bytes and these two tokens
VALIDATION_EVERY = 20
LARGEST_FILE = 256 * 1024  # bytes
TOKENIZER_CHARACTERS = 50_000_000  # more would take long and teach the tokenizer nothing new
PARTS = ("train", "validation")
OUTPUTS = (*(f"corpus/{part}/text.jsonl" for part in PARTS), "tokenizer/tokenizer.json")
OUTPUTS += ("tokenizer/tokenizer_config.json", "report.txt")
# Folders that are not part of the standard library or not installed everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
LEFT_OUT |= {"encodings", "pydoc_data"}  # tables and documentation, not code


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def library() -> list[str]:
    """The standard library, ordered by the digest of the paths."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if LEFT_OUT.isdisjoint(name.parts)]
    names.sort(key=lambda name: digest(name.as_posix()))
    return [(folder / name).read_text("utf-8", errors="replace") for name in names]


def paths_below(folder: Path) -> Iterator[Path]:
    """The files and links below a folder; links to folders are not followed."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    for name, folders, files in os.walk(folder, onerror=refuse):
        links = [entry for entry in folders if Path(name, entry).is_symlink()]
        yield from (Path(name, entry) for entry in files + links)


def text_of(path: Path, out: Path) -> tuple[str, str]:
    """The text of a file and "", or "" and why it is left out, as are files below `out`."""
    if path.is_symlink() or not path.is_file():
        return "", "links and special files"
    if out in path.resolve().parents:
        return "", "in OUT"
    if path.stat().st_size > LARGEST_FILE:
        return "", f"over {LARGEST_FILE // 1024} KiB"
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    return ("", "not UTF-8 text") if "\0" in text else (text, "" if text else "empty")


def text_below(folders: Iterable[Path], out: Path) -> tuple[list[str], str]:
    """The text files below `folders`, in the order of the digests of their text, but none twice.

    Also how many files were left out and why.
    """
    found: dict[bytes, str] = {}
    left_out: Counter[str] = Counter()
    for path in (path for folder in folders for path in paths_below(folder)):
        text, why = text_of(path, out)
        key = digest(text)
        if why := why or ("copies" if key in found else ""):
            left_out[why] += 1
        else:
            found[key] = text
    reasons = ", ".join(f"{n:,} {why}" for why, n in sorted(left_out.items()))
    return [found[key] for key in sorted(found)], reasons or "nothing"


def shuffled_pieces(texts: list[str], size: int) -> list[str]:
    """Texts cut at the first line end after `size` characters; the pieces are sorted by digest."""
    pieces = []
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start + size) + 1 or len(text)
            pieces.append(text[start:end])
            start = end
    return sorted(pieces, key=digest)


def folder_names(folders: list[Path]) -> str:
    return printable(" ".join(folder.resolve().name for folder in folders))


def fingerprint(args: argparse.Namespace, texts: list[str]) -> str:
    """What determines the result, except for how many files were left out."""
    text = hashlib.sha256(Path(__file__).read_bytes() + b"".join(map(digest, texts)))
    versions = f"Python {sys.version.split()[0]}, tokenizers {tokenizers.__version__}"
    options = f"{args.vocab_size} tokens, pieces of {args.piece}"
    return f"{versions}, {options}, from {folder_names(args.folders)!r}, {text.hexdigest()}\n"


def refuse_other_files(out: Path) -> None:
    """Ends the script if OUT has files that it did not write and would delete, or read as text."""
    others = list(out.iterdir()) if not (out / "lock").exists() else []
    why = "was not written by this script"
    if not others:
        found = (path for part in PARTS for path in (out / "corpus" / part).glob("*"))
        others = [path for path in found if path.name != "text.jsonl" and path.name[0] != "."]
        why = "would be read as text"
    if others:
        sys.exit(f"prepare_data: {printable(min(others))} {why}: move it, or name another OUT")


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a new file in the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.writelines(lines)


def some(texts: list[str], characters: int) -> Iterator[str]:
    """The first texts, up to so many characters in all."""
    lengths = accumulate(map(len, texts))
    return (text for text, _ in takewhile(lambda pair: pair[1] <= characters, zip(texts, lengths)))


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(some(texts, TOKENIZER_CHARACTERS), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        sys.exit(f"prepare_data: only {tokenizer.get_vocab_size()} of {vocab_size} tokens learned")
    return tokenizer


def describe(texts: list[str], pieces: list[str], tokenizer: Tokenizer) -> str:
    sample = list(some(pieces, 1_000_000)) or pieces[:1]
    encoded = tokenizer.encode_batch(sample, add_special_tokens=False)
    length = sum(map(len, sample)) / sum(len(encoding.ids) for encoding in encoded)
    files, size = len(texts), sum(map(len, texts))
    return (
        f"  {files:,} files, {size / 1e6:.1f} million characters in {len(pieces):,} pieces\n"
        f"  about {size / length / 1e6:.1f} million tokens of {length:.2f} characters\n"
    )


def prepare(args: argparse.Namespace) -> str:
    """Fill the folder `out`, unless its stamp says that it is up to date; returns what was done."""
    out, stamp = args.out, args.out / "stamp"
    below = text_below(args.folders, out.resolve()) if args.folders else None
    texts, left_out = below or (library(), "nothing")
    if len(texts) < 2:
        found = f"{len(texts)} of at least 2 files of text (left out: {left_out})"
        sys.exit(f"prepare_data: {folder_names(args.folders)}: {found}")
    wanted = fingerprint(args, texts)
    filled = all((out / name).is_file() for name in (*OUTPUTS, "stamp"))
    if filled and stamp.read_text(errors="replace") == wanted:
        return f"data: {printable(out)} is prepared\n"
    stamp.unlink(missing_ok=True)
    held_out = texts[::VALIDATION_EVERY]
    rest = [text for i, text in enumerate(texts) if i % VALIDATION_EVERY]
    train, validation = (shuffled_pieces(part, args.piece) for part in (rest, held_out))
    for name, pieces in zip(OUTPUTS, (train, validation)):
        write(out / name, (json.dumps({"text": piece}) + "\n" for piece in pieces))
    tokenizer = train_tokenizer(train, args.vocab_size)
    config = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    write(out / OUTPUTS[2], [tokenizer.to_str(pretty=True)])
    write(out / OUTPUTS[3], [json.dumps(config, indent=2) + "\n"])
    source = folder_names(args.folders) or "files of the standard library"
    report = f"Training: {source}\n{describe(rest, train, tokenizer)}"
    report += f"Held out: every {VALIDATION_EVERY}th of its files\n"
    report += f"{describe(held_out, validation, tokenizer)}Left out: {left_out}\n"
    report += f"Tokenizer: byte-level BPE, {args.vocab_size:,} tokens\n"
    write(out / "report.txt", [report])
    write(stamp, [wanted])
    return f"data: {printable(out)} is new\n{report}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, nargs="?", default=Path("data"), help="folder to fill")
    folders = {"nargs": "+", "default": [], "metavar": "DIR", "help": "folders of text"}
    parser.add_argument("--from", type=Path, dest="folders", **folders)
    parser.add_argument("--vocab-size", type=int, default=512, metavar="N")
    parser.add_argument("--piece", type=int, default=400, metavar="CHARACTERS")
    args = parser.parse_args(argv)
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"no such folder: {folder}")
    if args.vocab_size not in VOCABULARIES:
        allowed = f"{VOCABULARIES[0]} to {VOCABULARIES[-1]}"
        parser.error(f"--vocab-size must be {allowed}, not {args.vocab_size}")
    if args.piece < 1:
        parser.error(f"--piece must be at least 1, not {args.piece}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        refuse_other_files(args.out)
        with (args.out / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several launches may run at once
            message = prepare(args)
    except OSError as error:  # a full disk does not name the file
        name = printable(error.filename or args.out)
        sys.exit(f"prepare_data: {name}: {error.strerror}")
    print(message, end="")


if __name__ == "__main__":
    main()
