"""Makes a corpus and a tokenizer from text on this machine; nothing is downloaded.

    python scripts/prepare_data.py [OUT] [--from DIR ...] [--held-out DIR ...]
                                   [--vocab-size N] [--piece CHARACTERS]

    OUT/corpus/train/text.jsonl        one {"text": ...} per line, as torchtitan's "c4_test" reads
    OUT/corpus/validation/text.jsonl   the held-out part: whole files, none of them in train
    OUT/tokenizer/tokenizer.json       byte-level BPE, with 512 tokens by default
    OUT/tokenizer/tokenizer_config.json
    OUT/report.txt                     what the text is; it is printed, too

The text is Python's standard library: all its .py files, also empty ones and copies, except those
in the folders LEFT_OUT, such as site-packages, test and encodings. With --from it is the text files
below the named folders. There a file is text if it is UTF-8 without zero bytes; empty files, files
over 256 KiB, which are mostly generated tables, copies of other files, links and files below OUT
are left out. The held-out part is a twentieth of the files or, with --held-out, the files below
those folders, except those that are also in train.

Source files are cut into pieces of about 400 characters, or as --piece says, which are sorted by
their hash. For training this order is as good as random, but it is the same on every machine. So a
batch mixes text from many files, and all data-parallel ranks, each of which reads one stretch of
the corpus, see the same kind of text. The debug models have a vocabulary of 2048; with 512 tokens
each token occurs more often, and more is learned in a hundred steps.

The result depends only on the text, the suffixes of its files, the names of the folders, the
options, the versions of Python and tokenizers, and this file, not on where the folders are.
OUT/stamp records all of these and is written last. If it matches and no file is missing, nothing is
done, even if other files were left out than the report says. Otherwise the files above are
replaced, and no other file in OUT is touched. Three things end the script before it changes
anything: one of these files without a stamp of this script, a link in the place of one of them or
of a folder in OUT, and another file beside a text.jsonl, which torchtitan would read as text;
hidden files are allowed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple, NoReturn

import tokenizers
from tables import printable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
VOCABULARIES = range(258, 2**31)  # at least the bytes and the two tokens below
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
VALIDATION_EVERY = 20
PIECE = 400  # characters
LARGEST_FILE = 256 * 1024  # bytes
TOKENIZER_CHARACTERS = 50_000_000  # more would take long and teach the tokenizer nothing new
OUTPUTS = ("corpus/train/text.jsonl", "corpus/validation/text.jsonl", "tokenizer/tokenizer.json")
OUTPUTS += ("tokenizer/tokenizer_config.json", "report.txt")
UNFINISHED = "stamp.part"  # the stamp until all of them are written
MARK = re.compile(rb"Python \S+, tokenizers \S+, [0-9a-f]{64}, ")  # how a stamp begins
# Folders that are not part of the standard library or not installed everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
LEFT_OUT |= {"encodings", "pydoc_data"}  # tables and documentation, not code
PROSE = {".adoc", ".html", ".md", ".mdx", ".pod", ".rst", ".tex", ".texi", ".texinfo", ".txt"}
CODE = {".S", ".asm", ".awk", ".c", ".cc", ".cpp", ".cxx", ".d", ".el", ".f", ".f90"}
CODE |= {".go", ".h", ".hpp", ".hs", ".hxx", ".inc", ".java", ".js", ".l", ".lua", ".m", ".m4"}
CODE |= {".ml", ".mod", ".pas", ".pl", ".pm", ".py", ".rb", ".rs", ".s", ".scm", ".sh", ".sql"}
CODE |= {".tcl", ".ts", ".vim", ".y"}


class File(NamedTuple):
    """A text file: the suffix of its name, and its text."""

    suffix: str
    text: str


@dataclass
class Part:
    """The training part or the held-out part, and how many files were left out, by reason."""

    files: list[File]
    left_out: Counter[str] = field(default_factory=Counter)

    def characters(self) -> int:
        return sum(len(file.text) for file in self.files)


def fail(path: Path | str, error: OSError) -> NoReturn:
    sys.exit(f"prepare_data: {path}: {error.strerror}")


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="backslashreplace")).digest()


def library() -> tuple[Part, Part]:
    """Training and held-out part of the standard library, ordered by the digest of their path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if LEFT_OUT.isdisjoint(name.parts)]
    names.sort(key=lambda name: digest(name.as_posix()))
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in names]
    return split([File(".py", text) for text in texts])


def split(files: list[File]) -> tuple[Part, Part]:
    train = [file for i, file in enumerate(files) if i % VALIDATION_EVERY]
    return Part(train), Part(files[::VALIDATION_EVERY])


def why_left_out(path: Path, out: Path) -> str | None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "links and special files"
    if out in path.resolve().parents:
        return "in OUT"
    if status.st_size > LARGEST_FILE:
        return f"over {LARGEST_FILE // 1024} KiB"
    return None if status.st_size else "empty"


def in_order(folder: Path) -> list[Path]:
    """The files and links below a folder, in the order of their paths relative to it.

    So which of two copies comes first does not depend on where the folder is. Links to folders are
    not followed.

    Raises:
        OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    paths: list[Path] = []
    for name, folders, files in os.walk(folder, onerror=refuse):
        links = [link for link in folders if os.path.islink(os.path.join(name, link))]
        paths += (Path(name, entry) for entry in links + files)
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def text_below(folders: Iterable[Path], out: Path, seen: set[bytes]) -> Part:
    """The text files below `folders`, in the order of the digests of their text, but none twice.

    Args:
        out: the folder whose files are left out: an earlier call wrote them.
        seen: the digests of texts that count as copies; those found here are added.
    """
    found: dict[bytes, File] = {}
    left_out: Counter[str] = Counter()
    for path in (path for folder in folders for path in in_order(folder)):
        if reason := why_left_out(path, out):
            left_out[reason] += 1
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        except OSError as error:
            fail(path, error)
        key = digest(text)
        if "\0" in text:
            left_out["not UTF-8 text"] += 1
        elif key in seen:
            left_out["copies"] += 1
        else:
            seen.add(key)
            found[key] = File(printable(path.suffix), text)
    return Part([found[key] for key in sorted(found)], left_out)


def below(folders: list[Path], held_out: list[Path], out: Path) -> tuple[Part, Part]:
    """Training and held-out part of the text below folders, but not below `out`."""
    seen: set[bytes] = set()
    train = text_below(folders, out, seen)
    if held_out:
        return train, text_below(held_out, out, seen)
    parts = split(train.files)
    parts[0].left_out = train.left_out
    return parts


def shuffled_pieces(texts: Iterable[str], size: int = PIECE) -> list[str]:
    """Cut texts at the first line end after `size` characters, and sort the pieces by digest."""
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


def fingerprint(args: argparse.Namespace, parts: tuple[Part, Part]) -> str:
    """What determines the result, except for how many files were left out. It begins with MARK."""
    text = hashlib.sha256()
    for part in parts:
        for file in part.files:
            text.update(digest(file.suffix) + digest(file.text))
        text.update(b"/")
    this = digest(Path(__file__).read_text(encoding="utf-8")).hex()
    versions = f"Python {sys.version.split()[0]}, tokenizers {tokenizers.__version__}"
    options = f"{args.vocab_size} tokens, pieces of {args.piece}"
    folders = f"from {folder_names(args.folders)!r}, held out {folder_names(args.held_out)!r}"
    return f"{versions}, {this}, {options}, {folders}, {text.hexdigest()}\n"


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a new file in the place of `path`, whose other names keep the old one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        if path.is_file():
            path.unlink()  # half a stamp would not be known as one
        fail(error.filename or path, error)  # a full disk does not name the file


def write_corpus(texts: list[str], folder: Path) -> None:
    """Write texts as JSON lines, one document per line; the folder is a data set."""
    write(folder / "text.jsonl", (json.dumps({"text": text}) + "\n" for text in texts))


def stop(path: Path, why: str) -> NoReturn:
    sys.exit(f"prepare_data: {path} {why}: move it, or name another OUT")


def refuse_links(out: Path) -> None:
    """Ends the script if it would write through a link in OUT, which itself may be one."""
    for name in map(Path, ("lock", UNFINISHED, "stamp", *OUTPUTS)):
        for path in (name, *name.parents[:-1]):
            if (out / path).is_symlink():
                stop(out / path, "is a link")


def refuse_other_files(out: Path) -> None:
    """Ends the script if OUT has files that it did not write and would delete, or read as text."""
    stamps = [out / name for name in ("stamp", UNFINISHED) if os.path.lexists(out / name)]
    for stamp in stamps:
        if not stamp.is_file() or not MARK.match(stamp.read_bytes()):
            stop(stamp, "is of others")
    for name in () if stamps else OUTPUTS:
        if os.path.lexists(out / name):
            stop(out / name, "is of others")
    for folder in (out / "corpus/train", out / "corpus/validation"):
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            if path.name != "text.jsonl" and not path.name.startswith("."):
                stop(path, "would be read as text")


def some(texts: list[str], characters: int) -> Iterator[str]:
    """The first texts, up to so many characters in all."""
    lengths = accumulate(map(len, texts))
    return (text for text, _ in takewhile(lambda pair: pair[1] <= characters, zip(texts, lengths)))


def write_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` tokens on texts."""
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
    write(folder / "tokenizer.json", [tokenizer.to_str(pretty=True)])
    config = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    write(folder / "tokenizer_config.json", [json.dumps(config, indent=2) + "\n"])
    return tokenizer


def kinds(part: Part) -> str:
    """The shares of characters of code and prose, and of the commonest suffixes."""
    total, counts = part.characters(), Counter[str]()
    for file in part.files:
        counts[file.suffix] += len(file.text)
    code, prose = (sum(counts[suffix] for suffix in group) for group in (CODE, PROSE))
    common = [f"{suffix or 'none'} {count / total:.0%}" for suffix, count in counts.most_common(8)]
    rest = total - code - prose
    shares = f"source code {code / total:.0%}, prose {prose / total:.0%}, other {rest / total:.0%}"
    return f"{shares} (by suffix: {', '.join(common)})"


def describe(part: Part, texts: list[str], tokenizer: Tokenizer) -> str:
    sample = list(some(texts, 1_000_000)) or texts[:1]
    encoded = tokenizer.encode_batch(sample, add_special_tokens=False)
    length = sum(map(len, sample)) / sum(len(encoding.ids) for encoding in encoded)
    size = part.characters()
    left_out = [f"{count:,} {reason}" for reason, count in sorted(part.left_out.items())]
    lines = [
        f"{len(part.files):,} files, {size / 1e6:.1f} million characters in {len(texts):,} pieces",
        f"about {size / length / 1e6:.1f} million tokens of {length:.2f} characters",
        kinds(part),
        *([f"left out: {', '.join(left_out)}"] if left_out else []),
    ]
    return "".join(f"  {line}\n" for line in lines)


def prepare(args: argparse.Namespace) -> str:
    """Fill the folder `out`, unless it is filled and its stamp says that it is up to date.

    Returns:
        What was done, to be printed.
    """
    out, stamp = args.out, args.out / "stamp"
    refuse_other_files(out)
    parts = below(args.folders, args.held_out, out.resolve()) if args.folders else library()
    for name, part in zip(("training", "held-out"), parts):
        if not part.characters():
            counts = ", ".join(f"{count:,} {reason}" for reason, count in part.left_out.items())
            sys.exit(f"prepare_data: the {name} part has no text (left out: {counts or 'nothing'})")
    filled = all((out / name).is_file() for name in OUTPUTS)
    wanted = fingerprint(args, parts)
    if filled and stamp.exists() and stamp.read_bytes() == wanted.encode():
        return f"data: {printable(out)} is prepared\n"
    train, validation = (
        shuffled_pieces((file.text for file in part.files), args.piece) for part in parts
    )
    write(out / UNFINISHED, [wanted])
    for name in ("stamp", *OUTPUTS):
        (out / name).unlink(missing_ok=True)
    write_corpus(train, out / "corpus" / "train")
    write_corpus(validation, out / "corpus" / "validation")
    tokenizer = write_tokenizer(train, args.vocab_size, out / "tokenizer")
    report = f"Training: {folder_names(args.folders) or 'files of the standard library'}\n"
    report += describe(parts[0], train, tokenizer)
    apart = folder_names(args.held_out) or f"every {VALIDATION_EVERY}th of its files"
    report += f"Held out: {apart}\n"
    report += describe(parts[1], validation, tokenizer)
    report += f"Tokenizer: byte-level BPE, {args.vocab_size:,} tokens\n"
    write(out / "report.txt", [report])
    (out / UNFINISHED).rename(stamp)
    return f"data: {printable(out)} is new\n{report}"


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, nargs="?", default=Path("data"), help="folder to fill")
    folders = {"type": Path, "nargs": "+", "default": [], "metavar": "DIR"}
    parser.add_argument("--from", **folders, dest="folders", help="folders of text")
    parser.add_argument("--held-out", **folders, help="folders of text for the held-out part")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, metavar="N")
    parser.add_argument("--piece", type=int, default=PIECE, metavar="CHARACTERS")
    args = parser.parse_args()
    for folder in (*args.folders, *args.held_out):
        if not folder.is_dir():
            parser.error(f"no such folder: {folder}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"OUT is a file, {args.out}: name a folder")
    if args.held_out and not args.folders:
        parser.error("--held-out needs --from")
    if args.vocab_size not in VOCABULARIES:
        allowed = f"{VOCABULARIES[0]} to {VOCABULARIES[-1]}"
        parser.error(f"--vocab-size must be {allowed}, not {args.vocab_size}")
    if args.piece < 1:
        parser.error(f"--piece must be at least 1, not {args.piece}")
    return args


def main() -> None:
    try:
        args = parse()
        args.out.mkdir(parents=True, exist_ok=True)
        refuse_links(args.out)
        with (args.out / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several launches may run at once
            message = prepare(args)
    except OSError as error:
        fail(error.filename or args.out / "lock", error)  # flock alone does not name its file
    print(message, end="")


if __name__ == "__main__":
    main()
