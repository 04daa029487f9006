"""A base as plain transformers loads it."""

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory):
    """Where transformers copies code to; a process imports from one place only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="module")
def plain(base_directory, modules_cache):
    """The base as everybody loads it."""
    return AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float64)
