"""What the tests of the adapter for torchtitan 0.3 share."""

import gloo
import pytest

gloo.PRELOAD = "titan_0_3_ranks"


@pytest.fixture(autouse=True)
def fresh():
    """What conversions change is put back."""
    import torch
    from unpatched import restore

    from titan_fp8.patches import log_once
    from titan_fp8.torchtitan_0_3 import patches

    log_once.cache_clear()
    yield
    restore(patches.ON_CONVERSION)
    torch._dynamo.reset()
