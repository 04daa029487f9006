"""The tiny base with three random heads, for servers that live as long as a file of tests."""

import pytest

from medusa import MedusaModel


@pytest.fixture(scope="module")
def speaker(base, make_heads):
    return MedusaModel(base, make_heads())


@pytest.fixture(scope="module")
def client(live):
    """OpenAI's client of the server of a file."""
    with live.client() as client:
        yield client
