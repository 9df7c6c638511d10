"""Trains the runs of one arm one after another, in one process per GPU, which run.py launches.

torchtitan's trainer is built once, and so compiled once. Before each run `PairedTrainer.restart`
gives it new weights, a new state of the optimizer and of the learning rate, and another order of
the text, all of which depend on the seed alone: a run gives the same numbers whether it is the
first of its process or the tenth, and all arms of a seed start from the same weights and read the
same batches.
"""

import copy
import dataclasses
import fcntl
import importlib.metadata
import json
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import text as texts
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import titan_fp8.cpu_host

if not torch.cuda.is_available():
    titan_fp8.cpu_host.prepare()  # before torchtitan is imported

import arms
import flavors
from run import ARMS, Arm
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.moe.moe import MoE
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR

PARTS = {"tenth": 1 / 10, "third": 1 / 3, "two_thirds": 2 / 3, "end": 1.0}
"""The parts of a run after which the held-out loss is computed."""
CURVE_POINTS = 50
SPEED_FROM_STEP = 11  # the steps before it compile and warm up
VERSIONS = ("torch", "triton", "torchtitan", "torchao")


class PairedTrainer(Trainer):
    """torchtitan's trainer, for many runs one after another.

    Attributes:
        losses: (steps,), the mean loss of each batch of this run, of this rank's part of it.
    """

    def __init__(self, config: JobConfig, text: texts.Text):
        training = config.training
        flavors.register(
            config.model.name,
            build_dataloader_fn=None,
            build_tokenizer_fn=lambda config: SimpleNamespace(eos_id=text.end),
        )
        super().__init__(config)
        dims = self.parallel_dims
        if dims.pp_enabled or dims.cp_enabled or dims.tp_enabled:
            raise ValueError("paired runs train under FSDP, HSDP and expert parallelism alone")
        if text.vocabulary > self.model_args.vocab_size:
            raise ValueError(
                f"{config.model.name} {config.model.flavor} has {self.model_args.vocab_size:,} "
                f"tokens, and the text {text.vocabulary:,}"
            )
        self.text, self.steps, self.seq_len = text, training.steps, training.seq_len
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self.readers, self.reader = (mesh.size(), mesh.get_local_rank()) if mesh else (1, 0)
        self.local_batch = training.local_batch_size
        self.batch = self.local_batch * self.readers * self.gradient_accumulation_steps
        there, at_once = (len(text.held_out) - 1) // self.seq_len, self.local_batch * self.readers
        if there < at_once:
            raise ValueError(
                f"the held-out text has {there:,} sequences of {self.seq_len:,} tokens, and one "
                f"evaluation of all ranks reads {at_once:,} at once"
            )
        self.held_out = np.arange(there // at_once * at_once)
        self.metrics_processor.should_log = lambda step: False
        self.loss_sum, self.loss_fn = self.loss_fn, self.counted_loss
        self.fresh_optimizers = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
        self.fresh_schedule = copy.deepcopy(self.lr_schedulers.state_dict())

    def counted_loss(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch; its part of the batch's mean is kept."""
        loss = self.loss_sum(predictions, labels)
        self.losses[self.step - 1] += loss.detach() / (self.batch * self.seq_len)
        return loss

    def restart(self, seed: int) -> float:
        """Makes everything that training changes that of a new run.

        Returns:
            The sum of squares of this rank's weights: other weights have another one.
        """
        debug = dataclasses.replace(self.job_config.debug, seed=seed)
        dist_utils.set_determinism(self.parallel_dims, self.device, debug, ["pp"])
        (model,) = self.model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what an evaluation has left gathered
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        for optimizer, state in zip(self.optimizers, self.fresh_optimizers):
            optimizer.load_state_dict(copy.deepcopy(state))
        self.lr_schedulers.load_state_dict(self.fresh_schedule)
        self.step = self.ntokens_seen = 0
        self.losses = torch.zeros(self.steps, device=self.device, dtype=torch.float64)
        local = (getattr(p, "_local_tensor", p) for p in model.parameters())
        return sum(p.detach().double().square().sum() for p in local).item()

    def run(self, seed: int, ulp: bool) -> dict[str, Any]:
        """Trains one run, and returns what is reported of it."""
        weights = self.restart(seed)
        if ulp:
            arms.move_by_one_ulp(self.model_parts[0], seed)
        order = texts.order(len(self.text.train), self.seq_len, self.steps * self.batch, seed)
        evaluations = {name: max(1, round(part * self.steps)) for name, part in PARTS.items()}
        batches, held_out, evaluating = self.batches(order), {}, 0.0
        warm = time.time()
        for step in range(1, self.steps + 1):
            self.step = step
            self.gc_handler.run(step)
            self.train_step(batches)
            for part in (name for name, at in evaluations.items() if at == step):
                self.losses[step - 1].item()  # the GPU has caught up
                begin = time.time()
                held_out[part] = self.held_out_loss()
                evaluating += (time.time() - begin) * (step >= SPEED_FROM_STEP)
            if step == SPEED_FROM_STEP - 1:
                self.losses[step - 1].item()
                warm = time.time()
        losses = self.summed(self.losses).cpu().numpy()
        seconds = time.time() - warm
        timed = self.steps - SPEED_FROM_STEP + 1 if self.steps >= SPEED_FROM_STEP else self.steps
        tokens, points = self.batch * self.seq_len, min(CURVE_POINTS, self.steps)
        return {
            "seed": seed,
            "steps": self.steps,
            "tokens": self.steps * tokens,
            "held_out": held_out,
            "last_third": float(losses[-math.ceil(self.steps / 3) :].mean()),
            "curve": [round(float(part.mean()), 4) for part in np.array_split(losses, points)],
            "weights": weights,
            "order": zlib.crc32(order.tobytes()),
            "tokens_per_second": round(timed * tokens / (seconds - evaluating)),
            "seconds": round(seconds * self.steps / timed, 1),
        }

    def would_end(self, seconds: float) -> float:
        """When a run of so many seconds would end on the last rank, in seconds since 1970."""
        end = torch.tensor(time.time() + seconds, device=self.device, dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        return end.item()

    def sequences(
        self, tokens: np.ndarray, numbers: np.ndarray
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs and labels of sequences of `tokens`, by their numbers: (n, seq_len) each."""
        first = numbers[:, None] * self.seq_len
        rows = torch.from_numpy(tokens[first + np.arange(self.seq_len + 1)].astype(np.int64))
        return {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def batches(self, order: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """This rank's micro-batches of a run."""
        for batch in order.reshape(-1, self.batch):
            mine = batch.reshape(self.readers, -1, self.local_batch)[self.reader]
            yield from (self.sequences(self.text.train, numbers) for numbers in mine)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss of the held-out text, without the end that fills no batch."""
        (model,) = self.model_parts
        # Routing counts feed the balancing of experts, which training must find as it left them.
        counters = [b for n, b in model.named_buffers() if n.endswith("tokens_per_expert")]
        counted = [counter.clone() for counter in counters]
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        model.eval()
        for turn in self.held_out.reshape(-1, self.readers, self.local_batch):
            inputs, labels = self.sequences(self.text.held_out, turn[self.reader])
            inputs = {name: x.to(self.device) for name, x in inputs.items()}
            labels = labels.to(self.device)
            x, labels, extra, options = self.post_dataloading_process(inputs, labels)
            with self.train_context(), self.maybe_enable_amp:
                total += self.loss_sum(model(x, **extra, **options), labels)
        model.train()
        for counter, count in zip(counters, counted):
            counter.copy_(count)
        return self.summed(total).item() / (len(self.held_out) * self.seq_len)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks that read different text."""
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(x, group=self.parallel_dims.get_mesh("loss").get_group())
        return x


def apply(arm: Arm, config: JobConfig) -> None:
    """Makes the job of a TOML, which lists titan_fp8's converters as a user's does, that of an arm.

    Raises:
        ValueError: the TOML does not list titan_fp8's converter of linears.
    """
    converters = config.model.converters
    if LINEAR not in converters:
        raise ValueError(f"model.converters = {converters} lacks {LINEAR!r}, which arms change")
    quantize = config.quantize
    if arm.recipe:
        quantize.linear.titan_fp8.recipe, quantize.grouped_mm.titan_fp8.recipe = arm.recipe, None
    else:
        torchao = {LINEAR: "quantize.linear.float8", GROUPED_MM: "converge.torchao_experts"}
        config.model.converters = [torchao.get(name, name) for name in converters]
        quantize.linear.float8.recipe_name = arm.torchao
        quantize.linear.float8.filter_fqns = quantize.linear.titan_fp8.filter_fqns
        quantize.grouped_mm.float8.fqns = quantize.grouped_mm.titan_fp8.fqns
    if arm.converter:
        config.model.converters = [*converters, arm.converter]


def job_config(toml: str, flags: list[str], arm: str) -> JobConfig:
    """The config of an arm: that of the TOML, without logs, checkpoints and validation."""
    config = ConfigManager().parse_args(["--job.config_file", toml, *flags])
    apply(ARMS[arm], config)
    config.job.dump_folder = tempfile.mkdtemp(prefix="converge_")
    config.checkpoint.enable = config.validation.enable = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    if utils.device_type == "cpu":
        config.optimizer.implementation = "foreach"  # fused does not take DTensors on the CPU
    return config


def main(job: SimpleNamespace) -> None:
    """Trains the runs of a job, which is what `start` in run.py passes on."""
    init_logger()
    start = time.time()
    trainer = PairedTrainer(job_config(job.toml, job.flags, job.arm), texts.read(Path(job.text)))
    names = VERSIONS if "torchao" in job.arm else VERSIONS[:-1]
    versions = {name: importlib.metadata.version(name) for name in names}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {**job.about, "arm": job.arm, "device": device, "versions": versions}
    about["world"] = dist.get_world_size()
    about["experts"] = any(isinstance(module, MoE) for module in trainer.model_parts[0].modules())
    needed = 0.0
    for seed in job.seeds:
        if trainer.would_end(needed) > job.until:
            logger.info(f"{job.arm}: seed {seed} would not end in time")
            break
        run = trainer.run(seed, ARMS[job.arm].ulp)
        needed = run["seconds"]
        if dist.get_rank() == 0:
            line = {**about, **run, "since_start": round(time.time() - start, 1)}
            with Path(job.results).open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # other processes append to it
                file.write(json.dumps(line) + "\n")
            logger.info(f"{job.arm}: seed {seed}: held-out loss {run['held_out']['end']:.4f}")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(sys.argv[1])))
