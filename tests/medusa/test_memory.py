"""Decoding keeps no memory of requests that have ended."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def objects_of_before(model):
    """Do not look through the million objects of libraries each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensor_bytes():
    """Bytes of all storages that a new tensor in Python holds, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("drafter", ["hybrid", "ngram"])
def test_a_tree_size_tried_late_keeps_no_text(model, drafter):
    found = []
    for nodes in (8, 16):
        model.generate([[5, 6, 7], [8, 9]], max_new_tokens=20, drafter=drafter, nodes=nodes)
        found.append(live_tensor_bytes())
    assert found[1] - found[0] < 100  # a text is padded to 2,000 bytes


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["hybrid", None])
def test_live_tensors_do_not_grow_with_completions(model, drafter):
    found = []
    for number in range(12):
        model.generate([[5, 6, 7], [8, 9]], max_new_tokens=60, drafter=drafter, seed=[number, number + 1])
        if number in (3, 11):
            found.append(live_tensor_bytes())
    assert abs(found[1] - found[0]) < 1600
