"""Takes patches away again."""

from collections.abc import Iterable

from titan_fp8.patches import _ABSENT, Kernel, Patch, _replaced, log_once


def restore(patches: Iterable[Patch]) -> None:
    """Puts back the original of each target, where our replacement still is."""
    for target in (target for patch in patches for target in patch.targets):
        if (replaced := _replaced.pop(target.path, None)) is None:
            continue
        if isinstance(target, Kernel):
            replaced.replacement._destroy()
            continue
        owner, attribute = target.locate()
        if getattr(owner, attribute, _ABSENT) != replaced.replacement:
            continue
        if replaced.original is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, replaced.original)
    log_once.cache_clear()
