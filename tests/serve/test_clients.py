"""litellm, langchain-openai and instructor against our server, in versions of their own."""

import httpx
import pytest

from tests.serve.environments import run
from tests.serve.live import serving
from tests.serve.test_responses import TOOL_TEMPLATE

pytestmark = pytest.mark.slow


def test_other_clients_get_what_they_ask_for(with_template):
    with serving(with_template(TOOL_TEMPLATE)) as live:
        body = {"model": "small", "messages": [{"role": "user", "content": "say hello"}], "temperature": 0}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body | {"max_tokens": 20}).json()
        text = answer["choices"][0]["message"]["content"]
        told = run("clients", "clients_check.py", f"{live.url}/v1")
    lite, days = told["litellm"], (1, 2, 3)
    assert (lite["text"], lite["streamed"], lite["response"]) == (text, text, text)
    assert lite["days"] in days and lite["error"] == "ContextWindowExceededError"
    for found in told["langchain"].values():
        assert (found["text"], found["streamed"], found["after"]) == (text, text, True)
        assert found["days"] == found["streamed_days"] and {found["days"], found["schema"]} <= set(days)
    assert told["instructor"].keys() == {"TOOLS", "JSON_SCHEMA"} and set(told["instructor"].values()) <= set(days)
