"""Predicts, without a GPU, whether FP8 pays for a model and a parallel plan.

    python -m titan_fp8.plan CONFIG [--gpu GPU] [--ngpu N] [--link_gbps GB/S]
        [--filter auto [--out FILE]] [--section.key value ...]

CONFIG is the TOML of a run that loads the plugin; torchtitan's own flags override it. It prints a
table of all linears and experts on a rank, the parts of a step in bf16 and in FP8, and advice. The
exit status is 1 if FP8 is predicted to be slower than bf16, and 2 after bad input. With
`--filter auto` it prints the sections that leave out what slows the step down, and writes them to
FILE; it changes no other file.

`model.py` applies torchtitan's parallel plan to a model on the meta device and reads from it what a
rank computes (`run.py`); `batches.py` and `stages.py` say how often, and `checkpointing.py` what of
that backward repeats. `costs.py` says which kernels a layer runs, `times.py` interpolates their
times between measurements (`tables/`, written by `scripts/plan_table.py`), `step.py` adds up a
step, and `advice.py` predicts it again with something changed.

This module imports none of them: the command line prepares torchtitan before it is imported.
"""
