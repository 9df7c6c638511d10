"""Text to train on, without downloads."""

import contextlib
import inspect
import json
import os
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

LENGTH = 4000
"""Characters of a document."""


def write_text(folder: Path) -> Path:
    """Writes a byte-level tokenizer and a corpus of Python sources, without downloads."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((begin, end, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([begin, end])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "corpus").mkdir()
    texts = [inspect.getsource(module) for module in (inspect, json, os, subprocess, contextlib)]
    # In short documents, because the first one is tokenized in every training.
    parts = [text[i : i + LENGTH] for text in texts for i in range(0, len(text), LENGTH)]
    lines = [json.dumps({"text": part}) + "\n" for part in parts]
    (folder / "corpus" / "text.jsonl").write_text("".join(lines))
    return folder
