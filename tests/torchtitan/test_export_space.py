"""The export when the disk is too small, and other failures that leave an incomplete folder."""

import os
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exports import config_of, write_checkpoint
from safetensors import SafetensorError

from titan_fp8.export import exporter
from titan_fp8.export.exporter import export
from titan_fp8.export.run import Run

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def test_too_little_space(monkeypatch, tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    usage = exporter.shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(exporter.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"needs 3\.7 MB, and .* has 1\.0 MB left"):
        export(checkpoint, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_leaves_a_folder_that_the_error_names(monkeypatch, tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    out = tmp_path / "out"

    def save_file(*_, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(exporter.files, "save_file", save_file)
    with pytest.raises(OSError, match=f"OUT = {out} is incomplete, delete it: .*No space left"):
        export(checkpoint, out, config)
    assert out.exists() and not (out / "config.json").exists()


def test_a_nan_leaves_a_folder_that_the_error_names(tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    state = {name: torch.ones(meta.shape) for name, meta in Run(config).state.items()}
    state["norm.weight"][7] = torch.nan
    dcp.save(state, checkpoint_id=tmp_path / "step-1")
    out = tmp_path / "out"
    message = f"OUT = {out} is incomplete, delete it: norm.weight has NaN or infinite elements"
    with pytest.raises(ValueError, match=re.escape(message)):
        export(tmp_path / "step-1", out, config)
    assert out.exists() and not (out / "config.json").exists()


def test_a_damaged_checkpoint_leaves_a_folder_that_the_error_names(tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    os.truncate(checkpoint / "__0_0.distcp", 100)
    out = tmp_path / "out"
    message = f"OUT = {out} is incomplete, delete it: CHECKPOINT = {checkpoint}: "
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        export(checkpoint, out, config)
    assert str(error.value).endswith("a file is missing or damaged; export another step")
    assert out.exists() and not (out / "config.json").exists()
