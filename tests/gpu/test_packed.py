"""Packed weights on a GPU: the tests that elsewhere run in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.medusa.test_gpu_packed import *  # noqa: F403
from tests.medusa.test_gpu_packed import checkpoint, file, load, model  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
