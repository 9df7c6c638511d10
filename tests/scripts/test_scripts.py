"""The scripts: arguments that they refuse, the data they prepare, and what README and docs name."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LOG = ROOT / "docs" / "log.md"
PAGES += sorted(set((ROOT / "docs").glob("*.md")) - {LOG})
HISTORY = sorted((ROOT / "docs" / "history").glob("*.md"))
"""Their commands are those of their time, and so are the log's."""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a script with this interpreter; none of these calls gets as far as training."""
    env = {**os.environ, "TITAN_FP8_PYTHON": sys.executable, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def prepare_data(folder: Path) -> str:
    return run(sys.executable, "scripts/prepare_data.py", str(folder)).stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    assert "files of the standard library" in prepare_data(folder)
    return folder


def texts(data: Path, split: str) -> list[str]:
    lines = (data / "corpus" / split / "text.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama4"], "unknown argument 'llama4'"),
        (["--steps"], "--steps needs a positive number, not ''"),
        (["--steps", "0"], "--steps needs a positive number, not '0'"),
        (["llama3", "--steps", "ten"], "--steps needs a positive number, not 'ten'"),
        (["--torchtitan"], "--torchtitan must be 0.2 or 0.3, not ''"),
        (["--torchtitan", "0.4"], "--torchtitan must be 0.2 or 0.3, not '0.4'"),
    ],
)
def test_quickstart_refuses(arguments: list[str], message: str) -> None:
    result = run("scripts/quickstart.sh", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "usage: ./scripts/quickstart.sh [llama3|deepseek_v3] [--steps N]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "usage: ./scripts/train.sh CONFIG"),
        (["configs/none.toml"], {}, "no such config: configs/none.toml"),
        (["configs/none.py:llama3"], {}, "no such config: configs/none.py:llama3"),
        (["configs/llama3_debug.toml"], {"NGPU": "two"}, "NGPU must be a positive number"),
        (["configs/llama3_debug.toml"], {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
    ],
)
def test_train_refuses(arguments: list[str], variables: dict[str, str], message: str) -> None:
    result = run("scripts/train.sh", *arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("function", ["", ":"])
def test_train_wants_a_function_of_a_python_config(function: str) -> None:
    result = run("scripts/train.sh", f"configs/torchtitan_0_3.py{function}")
    assert result.returncode == 2
    assert f"configs/torchtitan_0_3.py{function} names no function" in result.stderr


def test_train_names_a_toml_that_is_not_utf_8(tmp_path: Path) -> None:
    """And takes one whose name looks like an option."""
    (tmp_path / "-x.toml").write_bytes(b"# \xe9\n")
    command = [str(ROOT / "scripts/train.sh"), "-x.toml"]
    env = {**os.environ, "TITAN_FP8_PYTHON": sys.executable}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"{tmp_path}/-x.toml cannot be read as UTF-8" in result.stderr


def test_scripts_name_an_unusable_python() -> None:
    config = "configs/llama3_debug.toml"
    result = run("scripts/train.sh", config, TITAN_FP8_PYTHON="/bin/false")
    assert result.returncode == 2
    assert "TITAN_FP8_PYTHON=/bin/false" in result.stderr


def test_a_finished_corpus_is_kept(data: Path) -> None:
    assert "is prepared" in prepare_data(data)


def test_corpus_is_the_standard_library_cut_in_pieces(data: Path) -> None:
    train, validation = texts(data, "train"), texts(data, "validation")
    assert len(train) > 10 * len(validation) > 0
    assert len({text for text in train if len(text) > 100} & set(validation)) < 10
    sizes = sorted(map(len, train))
    assert 400 <= sizes[len(sizes) // 2] < 500
    assert any("def fill(text, width=70, **kwargs):" in text for text in train + validation)


def test_tokenizer_has_512_tokens_and_loses_nothing(data: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(data / "tokenizer"))
    assert tokenizer.get_vocab_size() == 512
    assert {tokenizer.bos_id, tokenizer.eos_id} == {0, 1}
    text = "def f(x):\n    return 'é' + x\n"
    assert Tokenizer.from_file(str(data / "tokenizer/tokenizer.json")).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text


@pytest.mark.parametrize("split", ["train", "validation"])
def test_torchtitan_reads_the_corpus(data: Path, split: str) -> None:
    tokenizer = HuggingFaceTokenizer(str(data / "tokenizer"))
    ranks = [
        HuggingFaceTextDataset("c4_test", str(data / "corpus" / split), tokenizer, 64, rank, 2)
        for rank in range(2)
    ]
    first, second = (next(iter(dataset))[0]["input"] for dataset in ranks)
    assert first.shape == second.shape == (64,)
    assert not first.equal(second)
    assert first[0] == tokenizer.bos_id


def commands_of(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, continued lines joined."""
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines]
    return [command for command in commands if command]


def test_readme_has_the_two_commands() -> None:
    commands = commands_of(ROOT / "README.md")
    assert ["./scripts/quickstart.sh"] in commands
    assert ["./scripts/test.sh"] in commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_name_what_exists(page: Path) -> None:
    for command in commands_of(page):
        assert "#" not in command, "interactive zsh knows no comments"
        for word in command:
            if word.startswith(("./scripts/", "scripts/", "configs/", "tests/", "docs/")):
                path, _, function = word.partition(":")
                assert (ROOT / path).exists(), word
                assert not function or f"def {function}(" in (ROOT / path).read_text(), word
        if "scripts/converge/run.py" in command:
            config = command[command.index("scripts/converge/run.py") + 1]
            known = [ROOT / config, ROOT / f"scripts/converge/{config}.toml"]
            assert any(map(Path.exists, known)), config


@pytest.mark.parametrize("page", [*PAGES, LOG, *HISTORY], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]*)\)|^\[\w+\]: (\S+)$", page.read_text(), re.MULTILINE)
    for link in filter(lambda link: "://" not in link, map("".join, links)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else ()
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings
        ], link


def test_the_index_of_history_has_every_entry() -> None:
    index = (ROOT / "docs/history/README.md").read_text()
    for page in HISTORY:
        for date, title in re.findall(r"^### (2026-[\d-]+): (.*)$", page.read_text(), re.MULTILINE):
            assert f"- {date} [{title}]({page.name}#" in index
