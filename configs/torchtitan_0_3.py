"""The debug models for torchtitan 0.3, on the text and with the settings of the TOML files here.

    ./scripts/train.sh configs/torchtitan_0_3.py:llama3_debug
    ./scripts/train.sh configs/torchtitan_0_3.py:llama3_debug \
        --override.imports titan_fp8.torchtitan_0_3.blockwise

The first line trains in bf16, the second in FP8.
"""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer


def llama3_debug() -> Trainer.Config:
    """On two ranks with FSDP2."""
    config = debug(llama3.model_registry("debugmodel"), lr=5e-4)
    config.training.local_batch_size, config.training.seq_len = 4, 256
    validation = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path="./data/corpus/validation"
    )
    config.validator = Validator.Config(enable=True, freq=50, steps=4, dataloader=validation)
    return config


def deepseek_v3_debug() -> Trainer.Config:
    """On two ranks with FSDP2 and expert parallelism."""
    config = debug(deepseek_v3.model_registry("debugmodel"), lr=1.5e-4)
    config.training.local_batch_size, config.training.seq_len = 2, 192
    config.parallelism.expert_parallel_degree = 2
    # torchtitan's dispatch over all-to-all cannot be captured.
    config.training.disable_cuda_graphs = True
    return config


def debug(model_spec, lr: float) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./data/tokenizer",
        dataloader=HuggingFaceTextDataLoader.Config(
            dataset="c4_test", dataset_path="./data/corpus/train"
        ),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))
        ),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=20, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0
        ),
        training=TrainingConfig(steps=100),
        # torchtitan's default, spmd_types, needs torch 2.14 for FSDP2.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        debug=DebugConfig(seed=42, enable_structured_logging=False),
    )
