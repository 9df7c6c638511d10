"""Paired runs: what the runs of a seed have in common, and that a run does not depend on others."""

import pytest
import torch
from paired_runs import SCRIPTS, TINY, paired_trainer, write_moe, write_text
from titan import build, parse_args

ARMS = ("null", "blockwise", "control")
COMPILE = ("--compile.enable", "--compile.backend", "eager")
THREE_STEPS = ("--training.steps", "3")

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.npz")


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model_parts[0].parameters()]


def equal(ours, theirs) -> bool:
    return all(map(torch.equal, ours, theirs))


def result(trainer, seed: int, ulp: bool = False) -> tuple[dict, list[torch.Tensor]]:
    run = trainer.run(seed, ulp)
    del run["tokens_per_second"], run["seconds"]
    return run, weights(trainer)


def test_second_run_is_that_of_a_new_trainer(tmp_path, text):
    """Bit by bit, with the state of the optimizer, of the experts' balance and of random errors."""
    arm, toml = "errors", write_moe(tmp_path)
    with paired_trainer(arm, text, toml, *THREE_STEPS) as trainer:
        first, _ = result(trainer, 1)
        second, after_second = result(trainer, 2)
    with paired_trainer(arm, text, toml, *THREE_STEPS) as trainer:
        alone, after_alone = result(trainer, 2)
    assert second == alone and equal(after_second, after_alone)
    assert first["curve"] != second["curve"]


def test_second_run_compiles_nothing(text):
    from torch._dynamo.utils import counters

    flags = (*COMPILE, *THREE_STEPS)
    with paired_trainer("blockwise", text, TINY, *flags) as trainer:
        trainer.run(1, False)
        compiled = counters["stats"]["unique_graphs"]
        assert compiled
        trainer.run(2, False)
    assert counters["stats"]["unique_graphs"] == compiled


def test_arms_of_a_seed_start_from_the_same_weights_and_read_the_same_text(text):
    seen = {}
    for arm in ("bf16", *ARMS):
        with paired_trainer(arm, text, TINY, *THREE_STEPS) as trainer:
            run = trainer.run(3, arm == "null")
            trainer.restart(3)
            seen[arm] = run, weights(trainer)
    run, start = seen["bf16"]
    for arm in ARMS:
        other, theirs = seen[arm]
        assert equal(start, theirs)
        assert all(run[key] == other[key] for key in ("weights", "order", "tokens"))
        assert run["held_out"] != other["held_out"]


def test_the_null_is_one_ulp_away(text):
    import arms

    with paired_trainer("bf16", text, TINY) as trainer:
        trainer.restart(1)
        start = weights(trainer)
        arms.move_by_one_ulp(trainer.model_parts[0], 1)
        moved = weights(trainer)
    for before, after in zip(start, moved):
        ulps = (before.view(torch.int32) - after.view(torch.int32)).abs()
        assert torch.equal(ulps, (before != 0).int())


def test_runs_read_text_once_and_all_of_the_held_out_text(text):
    with paired_trainer("bf16", text, TINY) as trainer:
        read = []
        trainer.train_step = lambda batches: read.append(next(batches))
        trainer.held_out_loss = lambda: 0.0
        trainer.run(1, False)
        train = torch.from_numpy(trainer.text.train.astype("int64"))
        starts = set()
        for inputs, labels in read:
            for x, y in zip(inputs["input"], labels):
                places = (train.unfold(0, 64, 64) == x).all(1).nonzero().flatten().tolist()
                assert len(places) == 1 and torch.equal(y[:-1], x[1:])
                assert y[-1] == train[places[0] * 64 + 64]
                starts.update(places)
        assert len(starts) == 12 * 8


def test_held_out_loss_is_that_of_all_its_tokens_and_does_not_change_training(text):
    import worker

    with paired_trainer("bf16", text, TINY) as trainer:
        run, end = result(trainer, 1)
        model = trainer.model_parts[0]
        tokens = torch.from_numpy(trainer.text.held_out.astype("int64"))
        rows = tokens[: 16 * 64 + 1]  # two whole batches of 8 sequences
        with torch.no_grad(), trainer.maybe_enable_amp:
            logits = model(rows[:-1].view(16, 64)).float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[1:]).item()
    assert run["held_out"]["end"] == pytest.approx(loss, abs=1e-4)
    with pytest.MonkeyPatch.context() as patch, paired_trainer("bf16", text, TINY) as trainer:
        patch.setattr(worker, "PARTS", {"end": 1.0})
        assert equal(end, result(trainer, 1)[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--training.steps", "59"),
            "the text has 468 sequences of 64 tokens, and a run reads 472",
        ),
        (
            ("--training.seq_len", "1024"),
            "the held-out text has 1 sequences of 1,024 tokens",
        ),
        (("--model.flavor", "small"), "llama3 small has 256 tokens, and the text 512"),
    ],
)
def test_refuses(text, flags, message, monkeypatch):
    import dataclasses

    import flavors

    llama3 = flavors.FLAVORS["llama3"]
    small = dataclasses.replace(llama3["paired_tiny"], vocab_size=256)
    monkeypatch.setitem(llama3, "small", small)
    toml = TINY
    with (
        pytest.raises(ValueError, match=message),
        paired_trainer("bf16", text, toml, *flags) as trainer,
    ):
        trainer.run(1, False)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_torchao_takes_the_place_of_our_converters(tmp_path, recipe):
    from worker import ARMS, apply, job_config

    flags = ["--quantize.linear.titan_fp8.filter_fqns", "output,wq"]
    config = job_config(str(write_moe(tmp_path)), flags, f"torchao_{recipe}")
    assert config.model.converters == ["quantize.linear.float8", "converge.torchao_experts"]
    float8 = config.quantize.linear.float8
    assert (float8.recipe_name, float8.filter_fqns) == (recipe, ["output", "wq"])
    with pytest.raises(ValueError, match="lacks 'quantize.linear.titan_fp8', which arms change"):
        apply(ARMS["bf16"], config)


@pytest.mark.parametrize("model", ["llama3", "deepseek_v3", "qwen3"])
def test_models_are_as_large_as_they_should_be(model, monkeypatch):
    import flavors
    from torchtitan.protocols import train_spec

    monkeypatch.setattr(train_spec, "_extra_train_specs", {})
    flavors.register(model)
    config = parse_args(["--job.config_file", SCRIPTS / f"{model}.toml"])
    training = config.training
    assert training.steps * training.local_batch_size * training.seq_len >= 20e6
    built = build(config)
    parameters = dict(built.named_parameters())
    moe = getattr(built.model_args, "moe_args", None)
    active = sum(
        p.numel() * (moe.top_k / moe.num_experts if ".experts." in name else 1)
        for name, p in parameters.items()
    )
    assert 100e6 <= active <= 300e6
    odd = {n.split(".")[-2] for n, p in parameters.items() if p.ndim > 1 and p.shape[-2] % 128}
    assert odd <= {"wkv_a", "gate"}
