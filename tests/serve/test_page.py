"""The web page: its files, and the page in a browser.

The slow tests need Chromium and playwright, which drives it and need not bring a browser of its own:

    apt-get update && apt-get install -y --no-install-recommends chromium
    .venv/bin/pip install playwright

Any other Chromium or Chrome will do: name it in CHROMIUM.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from serve.api.app import PAGE, create_app
from serve.settings import ApiSettings
from tests.serve.live import serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FIGURES = re.compile(
    r"\d+ tokens · [\d.]+ tokens/s · (\d\.\d\d) tokens per step · (\d+) of (\d+) drafted accepted · first after \d+"
)


@pytest.fixture(scope="module")
def texts():
    return {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}


def test_files_are_served_as_what_they_are(texts):
    client = TestClient(create_app(SimpleNamespace(settings=ApiSettings(), engine=None)))
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    assert texts.keys() == {"index.html", "page.css", "page.js", "figures.js", "common.js"}
    for name, kind in ((name, kinds[Path(name).suffix]) for name in texts):
        answer = client.get("/" if name == "index.html" else f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.text == texts[name]


def test_page_refers_to_nothing_outside_of_the_server(texts):
    for text in texts.values():
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', texts["index.html"])) == {"page.js", "page.css", "data:,"}
    assert "default-src 'self'" in texts["index.html"]


def test_script_finds_what_it_looks_for_and_never_writes_html(texts):
    there = re.findall(r'\bid="([^"]+)"', texts["index.html"])
    assert len(there) == len(set(there))
    scripts = "".join(text for name, text in texts.items() if name.endswith(".js"))
    wanted = re.findall(r'(?:\$|chosen|number|show)\("([^"]+)"', scripts)
    assert set(wanted) <= set(there)
    assert set(re.findall(r"#([a-z][\w-]*)[^;{]*{", texts["page.css"])) <= set(there)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", scripts)


def test_every_field_has_a_label(texts):
    html = texts["index.html"]
    named = set(re.findall(r'<label[^>]*\bfor="([^"]+)"', html))
    inside = "".join(re.findall(r"<label\b.*?</label>", html, re.DOTALL))
    for field in re.findall(r'<(?:input|select|textarea)[^>]*\bid="([^"]+)"', html):
        assert field in named or f'id="{field}"' in inside, field


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or name one in CHROMIUM")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def live(speaker):
    """A server that needs 30 ms a step, so that a browser sees answers grow; they end at their limit only."""
    with serving(speaker) as live:
        step, submit = live.engine._batch.step, live.engine.submit
        live.engine._batch.step = lambda: (time.sleep(0.03), step())[1]
        live.engine.submit = lambda request: submit(replace(request, params=replace(request.params, ignore_eos=True)))
        yield live


@pytest.fixture
def opened(browser):
    """Opens a server's page; whatever the browser complains about fails the test."""
    complaints, contexts = [], []

    def visit(url):
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert [line for line in complaints if "Failed to load resource" not in line] == []


@pytest.fixture
def page(opened, live):
    page = opened(live.url)
    page.wait_for_selector("#model option", state="attached")
    page.fill("#max-tokens", "40")
    page.select_option("#drafter", "ngram")
    page.fill("#nodes", "8")
    return page


def send(page, text, wait=True):
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector("#send:visible")


def until(page, id_, pattern):
    """The text of an element as soon as it is of a pattern."""
    return page.locator(f"#{id_}", has_text=re.compile(pattern)).inner_text()


@pytest.mark.slow
def test_an_answer_streams_in_colours_and_moves_the_figures(page):
    assert "small · 3 recurrent heads · 256 tokens" in page.inner_text("#about")
    send(page, "say <b>aaa</b>", wait=False)
    lengths = page.evaluate("""async () => {
        const seen = new Set();
        while (!document.querySelector("#stop").hidden) {
            seen.add(document.querySelector(".answer").textContent.length);
            await new Promise((done) => setTimeout(done, 10));
        }
        return [...seen];
    }""")
    assert len(lengths) > 4
    assert lengths == sorted(lengths)
    assert page.inner_text(".question") == "say <b>aaa</b>"
    assert page.locator("b", has_text="aaa").count() == 0
    assert page.input_value("#message") == ""

    said = page.inner_text(".answer")
    page.click("#again")  # now n-grams know the answer
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".answer") == said
    per_step, accepted, drafted = FIGURES.match(page.inner_text(".figures")).groups()
    assert "cut at the limit" in page.inner_text(".figures")
    assert float(per_step) > 1
    assert 0 < int(accepted) <= int(drafted)
    assert 0 < page.locator(".answer .drafted").count() <= int(accepted)  # a letter of several bytes is one piece

    assert float(until(page, "rate", r"^[1-9]")) > 1
    assert float(until(page, "per-step", r"[1-9]\.(?!00)")) > 1, "once a draft was accepted"
    assert until(page, "accepted", r"\d").endswith("%")
    assert until(page, "first", r"\d").endswith("s")
    assert page.locator("#depths .bar").count() >= 1
    assert page.get_attribute("#line", "points")
    assert page.inner_text("#requests-running") == "0"


@pytest.mark.slow
def test_colours_can_be_switched_off(page):
    send(page, "aaa")
    page.click("#again")
    page.wait_for_selector(".answer .drafted")
    page.wait_for_selector("#send:visible")
    shade = "getComputedStyle(document.querySelector('.answer .drafted')).backgroundColor"
    assert page.evaluate(shade) != "rgba(0, 0, 0, 0)"
    page.uncheck("#coloured")
    assert page.evaluate(shade) == "rgba(0, 0, 0, 0)"
    assert not page.is_visible("#legend")


@pytest.mark.slow
def test_stop_regenerate_new_chat(page, live):
    page.fill("#max-tokens", "200")
    page.uncheck("#speculation")
    send(page, "go", wait=False)
    page.locator(".answer", has_text=re.compile(r"[\s\S]{6}")).wait_for()
    assert page.is_disabled("#again")
    assert until(page, "requests-running", "[1-9]") == "1"
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    stopped = page.inner_text(".figures")
    assert stopped.endswith("stopped")
    assert 0 < int(stopped.split()[0]) < 200
    while live.engine._jobs:
        time.sleep(0.02)

    before = page.inner_text(".answer")
    page.fill("#max-tokens", "60")
    page.click("#again")
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector("#send:visible")
    assert page.locator(".turn").count() == 1
    assert page.inner_text(".figures").startswith("60 tokens")
    assert "1.00 tokens per step · nothing drafted" in page.inner_text(".figures")
    assert page.inner_text(".answer")[:5] == before[:5]  # greedy

    page.click("#reset")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#welcome")
    assert page.is_disabled("#again")


@pytest.mark.slow
def test_an_error_is_shown_as_the_server_says_it(page):
    page.fill("#max-tokens", "0")
    send(page, "hello")
    assert page.inner_text(".error") == "400: max_tokens (0) must be at least 1; raise it"
    page.fill("#max-tokens", "5")
    page.click("#again")
    page.wait_for_selector(".error", state="detached")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".figures").startswith("5 tokens")


@pytest.mark.slow
def test_settings_and_earlier_turns_reach_the_server(page):
    page.fill("#temperature", "0.5")
    page.fill("#seed", "7")
    page.select_option("#acceptance", "typical")
    assert page.is_visible("#lossy")
    page.fill("#message", "one")
    page.press("#message", "Shift+Enter")
    page.type("#message", "two")
    with page.expect_request("**/v1/chat/completions") as first:
        page.press("#message", "Enter")
    page.wait_for_selector("#send:visible")
    assert first.value.post_data_json == {
        "model": "small", "messages": [{"role": "user", "content": "one\ntwo"}], "temperature": 0.5, "max_tokens": 40,
        "seed": 7, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "speculation": {
            "enabled": True, "trace": True, "metrics": True, "drafter": "ngram", "nodes": 8, "acceptance": "typical",
        },
    }  # fmt: skip
    assert page.inner_text(".figures").endswith("LOSSY")

    page.uncheck("#speculation")
    page.fill("#seed", "")
    page.fill("#max-tokens", "3")
    with page.expect_request("**/v1/chat/completions") as second:
        send(page, "three")
    body = second.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["speculation"] == {"enabled": False, "trace": True, "metrics": True}
    assert "seed" not in body


@pytest.mark.slow
def test_a_server_with_keys_is_asked_with_the_key(opened, speaker):
    with serving(speaker, api=ApiSettings(api_keys=frozenset({"secret"}))) as live:
        page = opened(live.url)
        page.wait_for_selector("#key:visible")
        assert "401: API key is missing or wrong" in page.inner_text("#about")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#max-tokens", "5")
        send(page, "hello")
        assert page.inner_text(".figures").startswith("5 tokens")
        assert page.evaluate("[sessionStorage.key, localStorage.length, document.cookie].slice(1)") == [0, ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("data: [DONE]\n\n", None),
        ('data: {"error":{"message":"a step has failed"}}\n\ndata: [DONE]\n\n', "a step has failed"),
        ("", "The answer broke off: the connection has ended."),
    ],
)
def test_what_a_model_says_stays_text_and_a_broken_stream_is_told(page, end, error):
    said = '<img src=x onerror=\\"alert(1)\\"><b>bold</b>'
    chunk = f'data: {{"choices":[{{"delta":{{}},"pieces":[["{said}",true],["<i>é\\n",false]]}}]}}\n\n'
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=chunk + end)
    )
    send(page, "x")
    assert page.evaluate("document.querySelector('.answer').textContent") == said.replace("\\", "") + "<i>é\n"
    assert page.locator(".turn :is(img, b, i)").count() == 0
    assert page.locator(".error").all_inner_texts() == ([error] if error else [])


@pytest.mark.slow
def test_a_narrow_page_fits(page):
    page.set_viewport_size({"width": 360, "height": 700})
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.is_visible("#send")
    assert not page.is_visible("#temperature")
    page.click("aside details:nth-of-type(2) summary")
    assert page.is_visible("#temperature")


@pytest.mark.slow
def test_the_page_is_quiet_while_nobody_looks_and_tells_when_the_server_is_gone(page):
    asked = []
    page.route("**/metrics", lambda route: (asked.append(route.request.url), route.abort()))
    until(page, "requests-running", r"^\D$")
    assert asked
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true})")
    page.wait_for_timeout(200)
    count = len(asked)
    page.wait_for_timeout(1500)
    assert len(asked) == count
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "hello")
    assert page.inner_text(".error") == "The server cannot be reached."
