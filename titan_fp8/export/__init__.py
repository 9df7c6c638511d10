"""Writes a torchtitan checkpoint as Hugging Face safetensors in DeepSeek-V3's block-FP8 format.

    python -m titan_fp8.export CHECKPOINT OUT --config CONFIG [--section.key value ...]

docs/export.md says what OUT gets. `exporter.py` runs the export and writes the files. `run.py`
finds out which model the run has, and `tensors.py` which tensors to write and from which of the
checkpoint, which `checkpoint.py` reads. `loaders.py` has the rules of other software,
`hf_config.py` the fields of config.json. This module imports none of them: the command line
prepares torchtitan before it is imported.
"""
