"""prepare_data.py with folders of text: what it takes, what it leaves out, and what it reports."""

import errno
import io
import json
import os
import re
import resource
import sys
from pathlib import Path

import prepare_data
import pytest
from tokenizers import Tokenizer

VOCABULARY = 300


def source(i: int) -> str:
    lines = [f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(20)]
    return "".join(lines)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "docs").mkdir(parents=True)
    for i in range(30):
        (folder / f"module_{i}.py").write_text(source(i))
    (folder / "docs/manual.rst").write_text("Manual\n======\n" + "Some prose.\n" * 50)
    (folder / "docs/copy.py").write_text(source(3))
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes("é = 1\n".encode("latin-1"))
    (folder / "zero.bin").write_bytes(b"text\0text")
    (folder / "table.h").write_text("0, 0, 0,\n" * 40_000)
    (folder / "link.py").symlink_to(folder / "module_1.py")
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "apart.c").write_text("int apart(void) { return 1; }\n" * 30)
    (folder / "in_both.py").write_text(source(5))
    return folder


@pytest.fixture
def prepare(monkeypatch, capsys):
    def call(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, args)])
        prepare_data.main()
        return capsys.readouterr().out

    return call


def pieces(out: Path, part: str) -> list[str]:
    lines = (out / "corpus" / part / "text.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_text_is_taken_and_everything_else_left_out(package, tmp_path, prepare):
    out = tmp_path / "out"
    report = prepare(out, "--from", package, "--vocab-size", VOCABULARY)
    assert report.endswith((out / "report.txt").read_text())
    assert "Training: package\n" in report
    for reason in ("1 copies", "1 empty", "1 links", "1 over 256 KiB", "2 not UTF-8 text"):
        assert reason in report
    assert "29 files" in report and "Held out: every 20th of its files\n  2 files" in report
    everything = "".join(pieces(out, "train") + pieces(out, "validation"))
    assert len(everything) == sum(len(source(i)) for i in range(30)) + 614
    tokenizer = Tokenizer.from_file(str(out / "tokenizer/tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY


def test_no_file_is_in_both_parts(package, tmp_path, prepare):
    out = tmp_path / "out"
    prepare(out, "--from", package, "--vocab-size", VOCABULARY)
    train, validation = (
        set(re.findall(r"function_\d+_", "".join(pieces(out, part))))
        for part in ("train", "validation")
    )
    assert train and validation and not train & validation
    assert train | validation == {f"function_{i}_" for i in range(30)}


def test_the_result_does_not_depend_on_where_the_text_is(package, tmp_path, prepare):
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ("--vocab-size", VOCABULARY, "--piece", 500)
    prepare(first, "--from", package, *arguments)
    assert "is prepared" in prepare(first, "--from", package, *arguments)
    (tmp_path / "elsewhere").mkdir()
    moved = package.rename(tmp_path / "elsewhere/package")
    prepare(second, "--from", moved, *arguments)
    for name in ("corpus/train/text.jsonl", "corpus/validation/text.jsonl", "stamp", "report.txt"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert "is prepared" in prepare(first, "--from", moved, *arguments)
    assert 500 < max(map(len, pieces(first, "train"))) < 550


def test_names_that_are_not_utf_8_are_reported(package, other, tmp_path, prepare):
    """With a code for each such byte."""
    package = package.rename(tmp_path / os.fsdecode(b"d\xe9"))
    other = other.rename(tmp_path / os.fsdecode(b"\xe9t"))
    out = tmp_path / os.fsdecode(b"\xe9")
    call = out, "--from", package, other, "--vocab-size", VOCABULARY
    report = prepare(*call)
    assert f"data: {tmp_path}/\\udce9 is new\n" in report
    assert "Training: d\\udce9 \\udce9t\n" in report
    assert "is prepared" in prepare(*call)


def test_a_file_that_is_left_out_leaves_the_data_alone(package, tmp_path, prepare):
    """Such as one that Python caches there, while a job reads the corpus."""
    call = tmp_path / "out", "--from", package, "--vocab-size", VOCABULARY
    prepare(*call)
    (package / "cache.pyc").write_bytes(b"\xff\0")
    assert "is prepared" in prepare(*call)


@pytest.mark.parametrize("change", ["text", "folder", "--vocab-size", "--piece", "version"])
def test_what_determines_the_data_makes_it_anew(package, tmp_path, prepare, change, monkeypatch):
    out, options = tmp_path / "out", {"--vocab-size": VOCABULARY, "--piece": 400}
    flags = [word for pair in options.items() for word in pair]
    prepare(out, "--from", package, *flags)
    assert "is prepared" in prepare(out, "--from", package, *flags)
    if change == "text":
        (package / "module_0.py").write_text("x = 1\n")
    elif change == "folder":
        package = package.rename(tmp_path / "renamed")
    elif change == "version":
        monkeypatch.setattr("tokenizers.__version__", "0.1")
    else:
        flags[flags.index(change) + 1] += 10
    assert "is new" in prepare(out, "--from", package, *flags)
    assert ("renamed" in (out / "report.txt").read_text()) == (change == "folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "nowhere"], "no such folder: nowhere"),
        (["--vocab-size", "257"], "--vocab-size must be 258 to 2147483647, not 257"),
        (["--piece", "0"], "--piece must be at least 1, not 0"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, prepare, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        prepare(tmp_path / "out", *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_part_without_text_is_refused(package, tmp_path, prepare):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SystemExit, match="nothing: 0 of at least 2 files of text .left out: noth"):
        prepare(tmp_path / "out", "--from", tmp_path / "nothing")
    (package / "docs/copy.py").write_bytes((package / "docs/manual.rst").read_bytes())
    with pytest.raises(SystemExit, match="docs: 1 of at least 2 files .*: 1 copies"):
        prepare(tmp_path / "out", "--from", package / "docs")


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_what_cannot_be_read_is_named(package, tmp_path, prepare, monkeypatch, call):
    """This user may read everything, so the system's answer is replaced."""
    denied = {"scandir": package / "docs", "open": package / "docs/manual.rst"}[call]
    module = os if call == "scandir" else io
    real = getattr(module, call)

    def deny(path: Path | str, *args: object, **kwargs: object) -> object:
        if str(path) == str(denied):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(module, call, deny)
    with pytest.raises(SystemExit) as stop:
        prepare(tmp_path / "out", "--from", package)
    assert stop.value.code == f"prepare_data: {denied}: Permission denied"


def test_links_are_left_out_and_not_followed(package, other, tmp_path, prepare):
    """Also a link to itself, to a folder, and to nothing."""
    (package / "loop").symlink_to("loop")
    (package / "docs/other").symlink_to(other)
    (package / "nothing.py").symlink_to("nowhere")
    report = prepare(tmp_path / "out", "--from", package, "--vocab-size", VOCABULARY)
    assert "4 links and special files" in report
    assert "int apart" not in "".join(pieces(tmp_path / "out", "train"))


def test_what_it_wrote_is_not_read_again(package, prepare):
    """Even if OUT lies in a folder of text."""
    call = package / "out", "--from", package, "--vocab-size", VOCABULARY
    assert "is new" in prepare(*call)
    assert "is prepared" in prepare(*call)
    (package / "module_1.py").unlink()
    assert "is new" in prepare(*call) and "in OUT" in (package / "out/report.txt").read_text()
    both = {*pieces(package / "out", "train")} & {*pieces(package / "out", "validation")}
    assert not both


def test_what_is_missing_is_made_anew(package, tmp_path, prepare):
    call = tmp_path / "out", "--from", package, "--vocab-size", VOCABULARY
    prepare(*call)
    (tmp_path / "out/corpus/validation/text.jsonl").unlink()
    assert "is new" in prepare(*call)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(package, tmp_path, prepare):
    with pytest.raises(SystemExit, match="of 100000 tokens learned"):
        prepare(tmp_path / "out", "--from", package, "--vocab-size", 100_000)


def test_what_a_failed_call_left_behind_is_made_anew(package, tmp_path, prepare):
    options = tmp_path / "out", "--from", package, "--vocab-size"
    prepare(*options, VOCABULARY)
    with pytest.raises(SystemExit):
        prepare(*options, 100_000)
    assert "is new" in prepare(*options, VOCABULARY)
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()


def test_a_call_that_cannot_write_is_made_up_for(package, other, tmp_path, prepare):
    """A limit on the size of files acts like a full disk."""
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    call = out, "--from", other, package / "docs", "--vocab-size", VOCABULARY
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SystemExit, match="prepare_data: .*/out: File too large"):
            prepare(*call)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (out / "stamp").exists()
    assert "is new" in prepare(*call)


def test_an_out_that_cannot_be_filled_is_named(package, tmp_path, prepare):
    (tmp_path / "file").touch()
    for out, message in (("file", "File exists"), ("file/out", "Not a directory")):
        with pytest.raises(SystemExit, match=f"prepare_data: .*/{out}: {message}"):
            prepare(tmp_path / out, "--from", package)


def test_only_its_own_files_are_deleted(package, tmp_path, prepare):
    call = tmp_path / "out", "--from", package, "--vocab-size"
    prepare(*call, VOCABULARY)
    for name in ("notes", "corpus/test.jsonl", "tokenizer/notes", "corpus/train/.hidden"):
        (tmp_path / "out" / name).write_text("mine")
    assert "is new" in prepare(*call, VOCABULARY + 1)
    for name in ("notes", "corpus/test.jsonl", "tokenizer/notes", "corpus/train/.hidden"):
        assert (tmp_path / "out" / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["notes", "report.txt", "stamp"])
def test_a_folder_of_others_is_refused(package, tmp_path, prepare, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(SystemExit, match=f"{tmp_path}/out/{name} was not written by this script"):
        prepare(tmp_path / "out", "--from", package, "--vocab-size", VOCABULARY)
    assert [file.read_text() for file in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_file_next_to_the_text_is_refused(package, tmp_path, prepare, part):
    """Before anything is deleted, and also if the data is prepared: it would be read, too."""
    call = tmp_path / "out", "--from", package, "--vocab-size"
    prepare(*call, VOCABULARY)
    mine = tmp_path / "out/corpus" / part / "mine.jsonl"
    mine.write_text("mine")
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    for size in (VOCABULARY, VOCABULARY + 1):
        with pytest.raises(SystemExit) as stop:
            prepare(*call, size)
        assert str(mine) in str(stop.value.code) and "name another OUT" in str(stop.value.code)
    assert all(file.read_bytes() == content for file, content in before.items())
