"""Requests of every shape that the OpenAPI document allows, and of many that it does not: never a 5xx."""

import pytest

from serve.settings import ApiSettings, EngineSettings
from tests.serve.live import serving

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

ADMIN = {"Authorization": "Bearer root"}
EXAMPLES = 60
"""Of each endpoint and kind."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_breaks_the_server(speaker, mode):
    from hypothesis import HealthCheck, given, settings

    told = set()
    with serving(speaker, EngineSettings(max_batch=4), ApiSettings(admin_key="root", timeout=5.0)) as live:
        document = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        for result in document.get_all_operations():
            cases = result.ok().as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode))

            @settings(
                max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=cases)
            def check(case):
                response = case.call(base_url=live.url, headers=ADMIN)
                told.add(response.status_code)
                assert response.status_code < 500, (case.body, response.text)
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            try:
                check()
            except Exception as error:  # an endpoint without anything that could be wrong
                if "NegativeGeneration" not in type(error).__name__ and "Unsatisfiable" not in type(error).__name__:
                    raise
        assert live.engine.healthy(30) and not live.engine._of
    assert told >= ({200, 400} if mode == "POSITIVE" else {400})
