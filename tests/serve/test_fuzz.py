"""Requests of every shape that the OpenAPI document allows, and of many that it does not.

No answer is a 5xx, and each is what the document says of it.
"""

import pytest

from medusa.serve.settings import ApiSettings, EngineSettings
from tests.serve.live import serving

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

ADMIN = {"Authorization": "Bearer root"}
EXAMPLES = 60
"""Of each endpoint and kind."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_breaks_the_server(speaker, mode):
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi import checks

    by_schema = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
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
                if mode == "POSITIVE" and isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = "small"
                response = case.call(base_url=live.url, headers=ADMIN)
                told.add((case.path, response.status_code))
                assert response.status_code < 500, (case.body, response.text)
                case.validate_response(response, checks=by_schema)

            try:
                check()
            except Exception as error:  # an endpoint without anything that could be wrong
                if "NegativeGeneration" not in type(error).__name__ and "Unsatisfiable" not in type(error).__name__:
                    raise
        assert live.engine.healthy() and not live.engine._of
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")
    assert told >= {(path, status) for path in paths for status in ((200, 400) if mode == "POSITIVE" else (400,))}
