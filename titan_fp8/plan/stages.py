"""The stages of a pipeline, as torchtitan's `pipeline_llm` counts them."""

from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

V_SCHEDULES = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""Schedules in which a rank runs one stage on the way down and one on the way up."""


def stages_per_rank(parallelism: Any, ranks: int, blocks: int) -> int:
    """How many stages each rank of a pipeline runs.

    Args:
        parallelism: that section of torchtitan's config.
        ranks: of the pipeline, at least 2.
        blocks: transformer blocks of the model.

    Raises:
        ValueError: torchtitan refuses these stages, or would run only some of them.
    """
    p, name = parallelism, parallelism.pipeline_parallel_schedule
    try:
        schedule = get_schedule_class(name)
    except ValueError as error:
        raise ValueError(f"parallelism.pipeline_parallel_schedule = {name!r}: {error}") from None
    is_single, is_v = issubclass(schedule, PipelineScheduleSingle), schedule in V_SCHEDULES
    under = f"under pipeline_parallel_schedule = {name!r} on {ranks} ranks"
    # torchtitan counts the embedding and the output as so many layers.
    first = p.pipeline_parallel_first_stage_less_layers
    last = p.pipeline_parallel_last_stage_less_layers
    layers = blocks + first + last
    size, parts = p.pipeline_parallel_layers_per_stage, p.module_fqns_per_model_part

    def is_allowed(size: int) -> bool:
        each, rest = divmod(-(-layers // size), ranks)
        if is_single:
            return (each, rest) == (1, 0)
        return not rest and (each == 2 or (each > 2 and not (is_v and parts is None)))

    each = 1 if is_single else 2
    if size is not None:
        allowed = list(filter(is_allowed, range(1, layers + 1)))
        if size not in allowed:
            raise ValueError(
                f"parallelism.pipeline_parallel_layers_per_stage = {size}: allowed {under} "
                f"are {_in_words(allowed)}, for {blocks} blocks that count as {layers} layers"
            )
        each = -(-layers // size) // ranks
    if parts is not None:
        return _stages_of_parts(p, ranks, is_single, is_v, under)
    if each * ranks > layers:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {ranks}: allowed are up to {layers // each}, "
            f"since the model has {blocks} blocks, which count as {layers} layers, and "
            f"pipeline_parallel_schedule = {name!r} has {each} stages per rank"
        )
    most = layers // (each * ranks)
    for key, less in (("first", first), ("last", last)):
        if less > most:
            raise ValueError(
                f"parallelism.pipeline_parallel_{key}_stage_less_layers = {less}: allowed are up "
                f"to {most}, what each of {each * ranks} stages has at least of {layers} layers"
            )
    return each


def _stages_of_parts(p: Any, ranks: int, is_single: bool, is_v: bool, under: str) -> int:
    """Stages per rank of a config that lists the modules of each stage."""
    count = len(p.module_fqns_per_model_part)
    each, rest = divmod(count, ranks)
    wanted = None
    # torchtitan passes on to a single-stage schedule only the first of a rank's stages.
    if is_v or (is_single and not p.pipeline_parallel_schedule_csv):
        wanted = 2 if is_v else 1
    if rest or not each or (wanted and each != wanted):
        allowed = f"{wanted * ranks}" if wanted else f"multiples of {ranks}"
        raise ValueError(
            f"parallelism.module_fqns_per_model_part is a list of {count}: allowed {under} are "
            f"lists of {allowed}"
        )
    return each


def _in_words(numbers: list[int]) -> str:
    """Ascending numbers, such as "1, 3, 9 to 11"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, dict.fromkeys((r[0], r[-1])))) for r in runs) or "none"
