"""Batches are copied on a stream of their own, and everything else runs on the main stream.

The CPU has no streams, so names take their place. A GPU trains in tests/gpu/test_input_stream.py.
"""

import pytest
import torch
from titan import (
    CONVERTERS,
    LINEAR,
    converted,
    job,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torchtitan.tools import utils
from torchtitan.train import Trainer

from titan_fp8.host.torchtitan_0_2.input_stream import Streams as Replacements
from titan_fp8.patches import _module
from titan_fp8.torchtitan_0_2 import patches

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


class Stream:
    def __init__(self, name: str = "inputs"):
        self.name, self.waited_for = name, []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other.name)


class Streams:
    """Stands for torch.cuda's streams. `log` is what was done, with the stream it was done on."""

    def __init__(self) -> None:
        self.main = self.current = Stream("main")
        self.log: list[tuple[str, str]] = []

    def set(self, stream: Stream) -> None:
        self.current = stream

    def note(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logs the calls of a method."""
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            self.log.append((name, self.current.name))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.set)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return streams


def install() -> None:
    replacements = Replacements()
    patches.INPUT_STREAM.apply(replacements.train_step, replacements.forward_backward_step)


@pytest.fixture
def titan(text, tmp_path):
    """A trainer of two micro-batches a step."""
    flags = *training(text, tmp_path), "--training.global_batch_size", 4
    flags += "--training.local_batch_size", 2
    config = parse(tmp_path, toml("llama3", CONVERTERS["llama3"]), *flags)
    with one_process(), trainer(config) as titan:
        yield titan


def test_only_batches_are_prepared_on_the_stream_for_inputs(streams, titan, monkeypatch):
    install()
    assert titan.gradient_accumulation_steps == 2
    streams.note(titan, "post_dataloading_process", monkeypatch)
    streams.note(titan.optimizers, "step", monkeypatch)
    streams.note(titan.metrics_processor, "log", monkeypatch)
    batches = titan.batch_generator(titan.dataloader)

    def noted():
        for batch in batches:
            streams.log.append(("batch", streams.current.name))
            yield batch

    iterator = noted()
    for step in (1, 2):
        titan.step = step
        streams.log.clear(), streams.main.waited_for.clear()
        titan.train_step(iterator)
        assert streams.log == [
            *2 * [("batch", "inputs")],
            *2 * [("post_dataloading_process", "main")],
            *[("step", "main"), ("log", "main")],
        ]
        assert streams.main.waited_for == ["inputs", "inputs"]
        assert streams.current is streams.main


def test_between_micro_batches_the_stream_is_that_for_inputs(streams, titan, monkeypatch):
    after = []
    original = Trainer.forward_backward_step

    class Loss:
        def __init__(self, loss):
            self.loss = loss

        def detach(self):
            after.append(streams.current.name)
            return self.loss.detach()

    monkeypatch.setattr(
        Trainer,
        "forward_backward_step",
        lambda self, *, input_dict, labels, global_valid_tokens: Loss(
            original(
                self,
                input_dict=input_dict,
                labels=labels,
                global_valid_tokens=global_valid_tokens,
            )
        ),
    )
    install()
    titan.step = 1
    titan.train_step(titan.batch_generator(titan.dataloader))
    assert after == ["inputs", "main"]


def test_the_stream_is_the_main_one_again_after_an_error(streams, titan):
    install()
    with pytest.raises(ZeroDivisionError):
        titan.train_step(iter([1 / 0] for _ in range(1)))
    assert streams.current is streams.main


def test_trainers_with_a_forward_of_their_own_stay_on_the_main_stream(streams, titan):
    install()
    seen = []

    class Own(Trainer):
        def forward_backward_step(self, **inputs):
            seen.append(streams.current.name)
            return super().forward_backward_step(**inputs)

    titan.__class__, titan.step = Own, 1
    titan.train_step(titan.batch_generator(titan.dataloader))
    assert seen == ["main", "main"] and not streams.main.waited_for


class OnGPU(torch.Tensor):
    """A tensor of a GPU, which notes the streams that it is recorded on."""

    is_cuda = True

    def record_stream(self, stream: Stream) -> None:
        self.streams = [*getattr(self, "streams", []), stream]


def test_the_memory_of_a_batch_is_kept_for_the_main_stream(streams):
    """The inputs, the labels, and the count of tokens where only one rank has data."""
    inputs, labels, tokens = (torch.ones(2).as_subclass(OnGPU) for _ in range(3))
    pair = Replacements()
    pair.micro_batches = 1
    step = pair.forward_backward_step(lambda trainer, **inputs: torch.ones(()))
    step(None, input_dict={"input": inputs, "n": 3}, labels=labels, global_valid_tokens=tokens)
    assert [t.streams for t in (inputs, labels, tokens)] == 3 * [[streams.main]]


def test_a_forward_outside_a_step_leaves_the_stream_alone(streams, titan):
    install()
    inputs, labels = next(titan.batch_generator(titan.dataloader))
    titan.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=9.0)
    assert streams.current is streams.main and not streams.main.waited_for


def test_a_module_that_runs_as_the_main_program_is_that_program(monkeypatch):
    main = _module("__main__")
    assert _module("torchtitan.train") is not main
    with monkeypatch.context() as patched:
        patched.setattr(main, "__spec__", _module("torchtitan.train").__spec__)
        assert _module("torchtitan.train") is main


@pytest.mark.parametrize(
    "device, flags, installed",
    [
        ("cuda", (), True),
        ("cuda", (f"--{LINEAR}.recipe", "bf16"), False),
        ("cuda", (f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.host_speedups", "True"), True),
        ("cuda", (f"--{LINEAR}.host_speedups", "False"), False),
        ("cpu", (), False),
    ],
)
def test_runs_on_gpus_install_it_where_the_key_says_so(
    tmp_path, monkeypatch, streams, device, flags, installed
):
    original = Trainer.train_step
    monkeypatch.setattr(utils, "device_type", device)
    converted(job(tmp_path, "llama3", *flags, converters=CONVERTERS["llama3"]))
    assert (Trainer.train_step is not original) == installed
