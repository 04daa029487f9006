"""The web page: its files, and the page in a browser.

The slow tests need Chromium and playwright, which drives it and need not bring a browser of its own:

    apt-get update && apt-get install -y --no-install-recommends chromium
    .venv/bin/pip install playwright

Any other Chromium or Chrome will do: name it in CHROMIUM.
"""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from medusa.serve.api import reasoning
from medusa.serve.api.app import PAGE, create_app
from medusa.serve.api.reasoning import Writing
from medusa.serve.grammar import Grammars
from medusa.serve.reading import KNOWN
from medusa.serve.settings import ApiSettings
from tests.serve.live import serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FIGURES = re.compile(
    r"\d+ tokens · [\d.]+ tokens/s · (\d\.\d\d) tokens per step · (\d+) of (\d+) drafted accepted · first after \d+"
)


@pytest.fixture(scope="module")
def texts():
    """Our own files."""
    return {path.name: path.read_text(encoding="utf-8") for path in filter(Path.is_file, PAGE.iterdir())}


def test_files_are_served_as_what_they_are(texts):
    client = TestClient(create_app(SimpleNamespace(settings=ApiSettings(), engine=None)))
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
    assert texts.keys() == {"index.html", "page.css", "page.js", "figures.js", "common.js", "markdown.js"}
    for file in filter(Path.is_file, PAGE.rglob("*")):
        answer = client.get("/" if file.name == "index.html" else f"/{file.relative_to(PAGE)}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kinds[file.suffix]}; charset=utf-8"
        assert answer.text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["marked", "purify"])
def test_libraries_bring_their_version_and_licence(name):
    library, licence = (PAGE / "vendor" / f"{name}{end}" for end in (".js", ".LICENSE.txt"))
    assert re.search(
        r"(marked v|DOMPurify )\d+\.\d+\.\d+ [\s\S]*(MIT|Apache) ?license", library.read_text()[:300], re.IGNORECASE
    )
    assert re.search(r"Permission is hereby granted|Apache License", licence.read_text(encoding="utf-8"))
    assert "sourceMappingURL" not in library.read_text(), "browsers would ask for a file that is not there"


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
    assert until(page, "requests-running", "^0$")


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
    assert page.inner_text(".turn .error") == "400: max_tokens (0) must be at least 1; raise it"
    page.fill("#max-tokens", "5")
    page.click("#again")
    page.wait_for_selector(".turn .error", state="detached")
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
def test_the_oldest_turns_leave_a_full_context(page):
    for _ in range(2):
        answer_with(page, stream(["word " * 40, False]))
    send(page, "hi")
    assert "without the oldest 1 turn ·" in page.locator(".figures").last.inner_text()
    send(page, "y" * 300)
    assert "maximum context length" in page.inner_text(".turn .error")


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


def stream(*pieces, end="data: [DONE]\n\n"):
    """An answer as the server sends it."""
    return f"data: {json.dumps({'choices': [{'delta': {}, 'pieces': pieces}]})}\n\n{end}"


def answer_with(page, body):
    """Let the server say this, and ask for it."""
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1
    )
    send(page, "x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("data: [DONE]\n\n", None),
        ('data: {"error":{"message":"a step has failed"}}\n\ndata: [DONE]\n\n', "a step has failed"),
        ("", "The connection broke off; the server still runs. Regenerate asks again."),
    ],
)
def test_html_of_a_model_stays_text_and_a_broken_stream_is_told(page, end, error):
    said = '<img src=x onerror="alert(1)"><b>bold</b> [x](javascript:alert(1)) <!-- hidden -->'
    answer_with(page, stream([said, True], [" **<i>é</i>**\n\n<script>alert(1)</script>", False], end=end))
    shown = page.evaluate("document.querySelector('.answer').textContent")
    assert all(part in shown for part in (said.partition(" [x]")[0], "<!-- hidden -->", "<i>é</i>", "<script>alert(1)"))
    assert page.locator(".turn :is(img, b, i, script)").count() == 0
    assert page.locator(".answer a[href]").count() == 0
    assert page.locator(".error:visible").all_inner_texts() == ([error] if error else [])


@pytest.mark.slow
def test_markdown_is_shown_and_what_was_drafted_stays_marked(page):
    pieces = [["# Ti", False], ["tle\n\nSome **bo", True], ["ld**", True], [" & [li", False], ["nk](/docs)", True]]
    pieces += [["\n\n```python\nif a < ", False], ["b:", True], ["\n    f()\n```\n\n- one\n- two &amp;", False]]
    answer_with(page, stream(*pieces))
    assert page.inner_text(".answer h1") == "Title"
    assert page.inner_text(".answer strong") == "bold"
    assert page.get_attribute(".answer a", "href") == "/docs"
    assert page.inner_text(".answer pre") == "if a < b:\n    f()\n"
    assert page.inner_text(".answer .code-head").startswith("python")
    assert page.locator(".answer li").all_inner_texts() == ["one", "two &"]
    marked = page.locator(".answer .drafted").evaluate_all(
        "spans => spans.map((s) => [s.textContent, s.dataset.depth])"
    )
    assert marked == [["tle", "1"], ["Some ", "1"], ["bo", "1"], ["ld", "2"], ["nk", "1"], ["b:", "1"]]


@pytest.mark.slow
def test_a_reload_keeps_the_conversation_and_a_new_chat_forgets_it(page):
    page.fill("#system", "be brief")
    page.fill("#max-tokens", "20")
    send(page, "one")
    said = page.inner_html(".answer"), page.inner_text(".figures")
    page.fill("#max-tokens", "200")
    send(page, "two", wait=False)
    page.locator(".turn:nth-of-type(2) .answer", has_text=re.compile(r"\S")).wait_for()
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.locator(".question").all_inner_texts() == ["one", "two"]
    assert (page.locator(".answer").first.inner_html(), page.locator(".figures").first.inner_text()) == said
    assert page.locator(".figures").last.inner_text().endswith("stopped by a reload")
    page.fill("#max-tokens", "5")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#again")
    messages = asked.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert (messages[0]["content"], messages[-1]["content"]) == ("be brief", "two")
    page.wait_for_selector("#send:visible")
    page.click("#reset")
    page.reload()
    assert page.locator(".turn").count() == 0
    assert page.input_value("#system") == "be brief"


@pytest.mark.slow
def test_escape_stops_and_keeps_what_was_said(page):
    page.fill("#max-tokens", "200")
    send(page, "go", wait=False)
    page.locator(".answer", has_text=re.compile(r"\S{3}")).wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.inner_text(".figures").endswith("stopped")
    assert page.inner_text(".answer").strip()


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


@pytest.mark.slow
def test_a_server_that_is_gone_is_named_and_one_that_is_back_noticed(page):
    gone = "The server does not answer: it has ended, or cannot be reached. Start it again, then Regenerate."
    page.route("**/*", lambda route: route.abort())
    send(page, "hello")
    assert page.inner_text(".turn .error") == gone
    page.wait_for_selector("#gone:visible")
    page.unroute("**/*")
    page.wait_for_selector("#gone", state="hidden")
    page.click("#again")
    page.wait_for_selector(".turn .error", state="detached")


@pytest.mark.slow
def test_a_server_that_dies_in_an_answer_is_named(page):
    for path in ("metrics", "health"):
        page.route(f"**/{path}", lambda route: route.abort())
    answer_with(page, stream(["half", False], end=""))
    assert page.inner_text(".turn .error").startswith("The server does not answer")
    assert page.inner_text(".answer") == "half"


@pytest.mark.slow
def test_reasoning_is_shown_apart_and_closed_when_the_answer_begins(opened, base, with_template, monkeypatch):
    monkeypatch.setattr(reasoning, "ANY", {"type": "const_string", "value": "Let me see.\n"})
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n{# </think> #}"
    with serving(with_template(template)) as live:
        form = {"type": "grammar", "grammar": 'root ::= "Seven."'}
        whole = Writing(KNOWN[0]).whole(form, "<think>\n")
        constraint = Grammars(base).structure(whole, [], free=True)
        submit = live.engine.submit
        live.engine.submit = lambda request: submit(replace(request, constraint=constraint))
        page = opened(live.url)
        page.wait_for_selector("#model option", state="attached")
        page.fill("#max-tokens", "60")
        send(page, "How many?")
        assert page.inner_text(".answer") == "Seven."
        assert page.text_content(".thoughts p") == "Let me see."
        assert page.get_attribute(".thoughts", "open") is None
        page.click(".thoughts summary")
        assert page.inner_text(".thoughts p") == "Let me see."
        send(page, "And now?")  # the history holds no reasoning
        assert page.locator(".answer").nth(1).inner_text() == "Seven."
