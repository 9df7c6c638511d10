"""Writes a torchtitan checkpoint as Hugging Face safetensors in DeepSeek-V3's block-FP8 format.

    python -m titan_fp8.export CHECKPOINT OUT --config CONFIG [--section.key value ...]

CHECKPOINT is the folder of one step that a llama3, qwen3 or deepseek_v3 run has saved (DCP). OUT
gets what `transformers` loads:

    model-0000i-of-0000n.safetensors    `weight` in e4m3 and `weight_scale_inv`, one FP32 scale for
                                        each 128x128 block, of every linear and every expert
    model.safetensors.index.json        which file has which tensor
    config.json                         the model's dimensions and its quantization_config
    tokenizer.json, ...                 copies from model.hf_assets_path

Weights are brought to Hugging Face's order, rounded to the run's `training.mixed_precision_param`,
as FSDP2 and autocast do, and quantized by `titan_fp8.reference.quantize_128x128`. The README says
when these are the weights that the run's GEMMs read, and which modules stay in high precision.

`exporter.py` runs the export and writes the files. `run.py` finds out which model the run has, and
`tensors.py` which tensors to write and from which of the checkpoint, which `checkpoint.py` reads.
`loaders.py` has the rules of other software, `hf_config.py` the fields of config.json. This module
imports none of them: the command line prepares torchtitan before it is imported.

Memory: the checkpoint is never loaded as a whole. The tensors of one file are read and converted
one by one and written together; stacked weights of experts are read in parts of at most one file's
size. DCP reads the part of a tensor that one rank saved as a whole, so the peak is one file, and
twice the largest tensor of the checkpoint if a single rank saved it.
"""
