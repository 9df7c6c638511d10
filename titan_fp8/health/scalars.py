"""Writes the scalars of a report by torchtitan's loggers."""

from typing import Any


def write_scalars(logger: Any, scalars: dict[str, float], step: int) -> None:
    """Writes what was measured in `step`.

    A TensorBoard logger would make an event for each of a thousand scalars; they go into one.

    Args:
        logger: of torchtitan, 0.2 or 0.3: one logger or a container of several.
    """
    for each in getattr(logger, "_loggers", [logger]):
        if hasattr(each, "writer"):
            _write_event(each, scalars, step)
        else:
            each.log(scalars, step)


def _write_event(logger: Any, scalars: dict[str, float], step: int) -> None:
    # Imported here, since torchtitan, too, imports TensorBoard only for a run that uses it.
    from tensorboard.compat.proto.summary_pb2 import Summary

    prefix = "" if logger.tag is None else f"{logger.tag}/"
    values = [Summary.Value(tag=prefix + tag, simple_value=v) for tag, v in scalars.items()]
    logger.writer._get_file_writer().add_summary(Summary(value=values), step)
