"""The kernel that moves keys and values on a GPU: the tests that elsewhere run in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.medusa.test_gpu_moves import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
