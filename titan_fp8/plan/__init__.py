"""Whether FP8 will pay on a model and a parallel plan, before a GPU is spent on it.

    python -m titan_fp8.plan CONFIG [--gpu h100|h200] [--ngpu N] [--link_gbps GB/S]
        [--filter auto [--out FILE]] [--section.key value ...]

CONFIG is the TOML of a run that loads the plugin; torchtitan's own flags override it. It prints a
table of all linears and experts on a rank, the parts of a step in bf16 and in FP8, and advice. The
exit status is 1 if FP8 is predicted to be slower than bf16, and 2 after bad input. With
`--filter auto` it prints the sections that leave out what slows the step down, and writes them to
FILE; it changes no other file.

It needs no GPU. `model.py` applies torchtitan's parallel plan to a model on the meta device and
reads from it what a rank computes (`run.py`). `times.py` interpolates between the times that were
measured on a GPU (`tables/`, by `scripts/plan_table.py`), `costs.py` says which kernels a layer
runs, `step.py` adds up a step, and `advice.py` tries what could be changed.

This module imports none of them: the command line prepares torchtitan before it is imported.
"""
