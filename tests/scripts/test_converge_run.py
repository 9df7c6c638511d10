"""The driver of the paired runs: what it runs, skips and refuses; and the text that they read."""

import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import gloo
import pytest
import run
import text as texts
import torch.distributed as dist
from corpus import write_text as write_corpus
from paired_runs import SHORT, TINY, write_text
from tokenizers import Tokenizer

TWO_RANKS = [*SHORT, "--training.steps", "2", "--training.local_batch_size", "4"]
LAUNCHER = run.launcher
STUB = """
import json, os, sys, time
job = json.loads(sys.argv[1])
if job["arm"] == "null":
    sys.exit("no such GPU")
if job["arm"] == "rowwise":
    time.sleep(300)
assert {"toml", "text", "until"} <= job.keys()
for seed in job["seeds"]:
    line = job["about"] | {"arm": job["arm"], "seed": seed, "pid": os.getpid()}
    line |= {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "flags": job["flags"]}
    open(job["results"], "a").write(json.dumps(line) + "\\n")
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.npz")


@pytest.fixture
def call(tmp_path, monkeypatch, text):
    """Runs the driver with two GPUs and a worker that trains nothing; returns status and lines."""
    (tmp_path / "worker.py").write_text(STUB)
    (tmp_path / "m.toml").write_text("")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "GRACE", 0.0)
    monkeypatch.setattr(run, "launcher", lambda gpus: [sys.executable])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")

    def call(*args: str, results: str = "r.jsonl") -> tuple[int, list[dict]]:
        file = tmp_path / results
        status = run.main(["m", "--text", str(text), "--results", str(file), *args])
        return status, [json.loads(line) for line in file.read_text().splitlines()]

    return call


def done(lines: list[dict]) -> list[tuple[str, int]]:
    return sorted((line["arm"], line["seed"]) for line in lines)


def test_runs_each_seed_of_each_arm_once(call, tmp_path):
    status, lines = call("--arms", "bf16,blockwise", "--seeds", "1-2,5", "--", "--a.b", "c")
    assert status == 0
    assert done(lines) == [(arm, seed) for arm in ("bf16", "blockwise") for seed in (1, 2, 5)]
    assert {line["gpus"] for line in lines} == {"4", "6"}
    assert len({line["pid"] for line in lines}) == 2  # one process an arm
    assert all(line["flags"] == ["--a.b", "c"] for line in lines)


def test_torchrun_starts_the_worker(call, monkeypatch):
    monkeypatch.setattr(run, "launcher", LAUNCHER)
    status, (line,) = call("--arms", "bf16", "--seeds", "1")
    assert status == 0 and (line["arm"], line["seed"]) == ("bf16", 1)


def test_continues_where_it_stopped(call, tmp_path):
    _, lines = call("--arms", "bf16", "--seeds", "1-3")
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line["seed"] != 2))
    status, again = call("--arms", "bf16", "--seeds", "1-3")
    assert status == 0 and done(again) == done(lines)
    assert sum(line in lines for line in again) == 2
    status, more = call("--arms", "bf16", "--seeds", "1-4", "--known", str(file), results="2.jsonl")
    assert status == 0 and done(more) == [("bf16", 4)]


def test_an_arm_is_divided_between_idle_gpus(call):
    _, lines = call("--arms", "bf16", "--seeds", "1-3")
    gpus = {line["seed"]: line["gpus"] for line in lines}
    assert gpus[1] == gpus[3] != gpus[2]
    assert {line["gpus"] for line in call("--arms", "errors", "--gpus-per-run", "2")[1][3:]} == {
        "4,6"
    }


def test_a_failure_is_reported_and_the_rest_runs(call, capsys):
    status, lines = call("--arms", "null,bf16", "--seeds", "1")
    assert status == 1 and done(lines) == [("bf16", 1)]
    assert "null failed" in (out := capsys.readouterr().out) and "no such GPU" in out
    assert "1 runs are done, 1 are left" in out


def test_stops_in_time(call, capsys):
    status, lines = call("--arms", "bf16", "--minutes", "0")
    assert status == 3 and not lines
    status, _ = call("--arms", "rowwise", "--seeds", "1", "--minutes", "0.05")
    assert status == 3 and "rowwise is stopped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--arms", "fp4"), "there is no arm 'fp4': allowed are bf16, null, "),
        (("--known", "none.jsonl"), "no such file: none.jsonl"),
        (("--gpus-per-run", "3"), "--gpus-per-run 3: there are 2 GPUs"),
    ],
)
def test_refuses(call, capsys, args, message):
    with pytest.raises(SystemExit, match="2"):
        call(*args)
    assert message in capsys.readouterr().err


def test_refuses_results_of_another_experiment(call, capsys):
    call("--arms", "bf16", "--seeds", "1")
    assert call("--arms", "bf16", "--seeds", "2", "--", "--a.b", "c")[0] == 2
    assert "another TOML, another text or other flags" in capsys.readouterr().err


def test_refuses_a_text_that_is_none(call, tmp_path, capsys):
    (tmp_path / "bad.npz").write_text("")
    assert call("--text", str(tmp_path / "bad.npz"))[0] == 2
    assert "text.py makes such a file" in capsys.readouterr().err


def train(rank: int, job: dict) -> None:
    """What a process does that `start` in run.py launches."""
    import worker

    with mock.patch.object(dist, "destroy_process_group"):  # gloo.py does it, too
        worker.main(SimpleNamespace(**job))


def test_a_process_of_its_own_gives_the_same_numbers(text, tmp_path):
    """On two ranks, where an evaluation leaves weights gathered, and FSDP2 gathers in FP8."""
    job = {"toml": str(TINY), "text": str(text), "flags": TWO_RANKS, "arm": "blockwise"}
    lines = []
    for seeds in ([1, 2], [2]):
        results = tmp_path / f"{len(seeds)}.jsonl"
        mine = {"seeds": seeds, "results": str(results), "until": math.inf, "about": {"text": "a"}}
        gloo.spawn(train, 2, job | mine)
        lines.append([json.loads(line) for line in results.read_text().splitlines()])
        assert [line["seed"] for line in lines[-1]] == seeds
    second, alone = (each[-1] for each in lines)
    for timing in ("tokens_per_second", "seconds", "since_start"):
        del second[timing], alone[timing]
    assert second == alone and alone["world"] == 2 and alone["text"] == "a"


def test_text_is_the_corpus_in_tokens(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_corpus(folder)
    for part in ("train", "validation"):
        (tmp_path / "corpus" / part).mkdir(parents=True)
        lines = [json.dumps({"text": f"{part} é {i}"}) + "\n" for i in range(3)]
        (tmp_path / "corpus" / part / "text.jsonl").write_text("".join(lines))
    texts.write(tmp_path, out := tmp_path / "new/text.npz")
    text, tokenizer = texts.read(out), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (text.vocabulary, text.end) == (258, 1)
    ids = [[0, *tokenizer.encode(f"train é {i}").ids, 1] for i in range(3)]
    assert text.train.tolist() == sum(ids, [])
    other = texts.read(write_text(tmp_path / "other.npz"))
    assert text.digest != other.digest
