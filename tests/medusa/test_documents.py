"""Packed documents are what they are alone, in every family of models; docs/families.md says which need what."""

import logging

import pytest
import torch

from medusa.base.documents import document_rows
from medusa.loading.separation import choose_separation
from tests.medusa.test_conformance import DOCUMENT, FAMILIES, RECURRENT, SINGLE, tiny

NEEDS = dict.fromkeys(("afmoe", "falcon", "gpt_oss", "mpt", "opt", "opt-350m"), "masks") | dict.fromkeys(
    ("llama4_text", *RECURRENT), "rows"
)
"""Families whose own masks do not know packed documents."""
LENGTHS = ((5, 20, 1, 22), (17, 31))
"""Documents of two rows, longer than the windows of the families."""


def packed_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions [2, 48]."""
    ids = torch.randint(3, 50, (2, 48), generator=torch.Generator().manual_seed(1))
    return ids, torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_what_they_are_alone(family, caplog):
    base, oracle = tiny(family)
    with caplog.at_level(logging.WARNING, logger="medusa.loading.separation"):
        base = choose_separation(base, torch.arange(3, 45))
    assert base.traits.separation == NEEDS.get(family, "positions")
    assert ("hidden states of packed documents differ by" in caplog.text) == (family in NEEDS)
    ids, positions = packed_rows()
    decoder = oracle.model if family == "llama4_text" else oracle.get_decoder()
    with torch.no_grad():
        found = base.tapped((1,)).hidden_states(ids, positions)[..., : base.hidden_size]
        for row, lengths in enumerate(LENGTHS):
            expected = torch.cat([decoder(part[None])[0][0] for part in ids[row].split(lengths)])
            close = 1e-4 if family in SINGLE or family == "llama4_text" else 1e-5
            torch.testing.assert_close(found[row], expected, atol=close, rtol=close)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_base_with_a_padding_row_of_zeros_is_measured_too(leaks, monkeypatch):
    """Its hidden states are zero at such tokens, which transformers makes of a config with a padding token."""
    base, _ = tiny("llama")
    with torch.no_grad():
        base.model.get_input_embeddings().weight[0] = 0
    ids = torch.arange(3, 45)
    ids[:2] = ids[12:14] = ids[30:] = 0
    if leaks:  # as in a family whose masks know no documents: each position sees all before it
        whole = base.__class__.hidden_states
        monkeypatch.setattr(base.__class__, "hidden_states", lambda self, ids, positions=None: whole(self, ids))
        with pytest.raises(ValueError, match=r"hidden states of packed documents differ by \d"):
            choose_separation(base, ids)
    else:
        assert choose_separation(base, ids).traits.separation == "positions"


def test_the_families_page_names_those_that_need_more():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    named = next(line for line in lines if line.startswith("| masks with each pass"))
    assert all(f"`{family}`" in named for family, how in NEEDS.items() if how == "masks")
    named = next(line for line in lines if line.startswith("| a row for each document"))
    assert all(f"`{family}`" in named for family, how in NEEDS.items() if how == "rows")


def test_a_row_for_each_document_reads_every_token_once_and_no_more_at_a_time():
    _, positions = packed_rows()
    passes = document_rows(positions)
    places = torch.cat([places[real] for places, real in passes])
    assert sorted(places.tolist()) == list(range(96))
    assert all(places.numel() <= 96 for places, _ in passes)
    assert len(passes) == 2
    for places, real in passes:
        assert torch.equal(positions.flatten()[places[real]], torch.arange(places.shape[1]).expand_as(places)[real])


def test_gradients_pass_through_separate_rows():
    base, _ = tiny("llama")
    ids, positions = packed_rows()
    weight = base.model.get_input_embeddings().weight.requires_grad_()
    gradients = []
    for separation in ("positions", "rows"):
        base.with_traits(separation=separation).hidden_states(ids, positions).square().sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*gradients)


def test_one_process_in_which_it_leaks_decides_for_all():
    base, _ = tiny("llama")
    asked = []
    base = choose_separation(base, torch.arange(3, 45), lambda leaks: asked.append(leaks) or len(asked) < 3)
    assert (base.traits.separation, asked) == ("rows", [False, False, False])


def test_a_base_that_sees_what_is_behind_is_refused():
    base, _ = tiny("llama")
    run = base._pass
    base._pass = lambda input_ids, **rest: run(input_ids=input_ids, **rest) + input_ids.sum()
    with pytest.raises(ValueError, match="cannot be trained on: hidden states of packed documents differ by"):
        choose_separation(base, torch.arange(3, 45))
    assert base.traits.separation == "positions"


def test_half_precision_is_no_leak():
    base, _ = tiny("llama")
    base.model.bfloat16()
    assert choose_separation(base, torch.arange(3, 45)).traits.separation == "positions"
