"""The page at /, in headless Chromium."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from playwright.sync_api import expect

from tests.serve.http.page.conftest import Opens
from tests.serve.http.server import says
from tests.serve.http.stub import StubClient, busy
from tests.serve.http.words import TEMPLATE, text_of
from tests.serve.processes import Server, until

expect.set_options(timeout=60_000)  # milliseconds
HOSTILE = (
    "<img src=x onerror=\"document.title='run'\"> <script>document.title='run'</script>\n\n"
    "```html\n<svg onload=\"document.title='run'\">\n```\n\n[a](javascript:document.title='run')"
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sea", "sky"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
ENDLESS = {"type": "string", "minLength": 3900}
ORDERED = {"type": "object", "properties": {"b": {"const": 1}, "1": {"const": 2}}}
# Red, green and blue of an element's text and of what it stands on, 0..255 each.
COLOURS = """selector => {
  const numbers = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  let behind = document.querySelector(selector);
  const text = numbers(getComputedStyle(behind).color);
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
    behind = behind.parentElement;
  return [text, numbers(getComputedStyle(behind).backgroundColor)];
}"""


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Any) -> Any:
    """The last answer, once it has ended."""
    last = page.locator("article.answer").last
    expect(last).not_to_have_class("answer busy")
    return last.locator(".text")


def test_an_answer_streams_and_escape_ends_it(opened: Opens) -> None:
    client = StubClient(says("Hello there.", waits_after=5))
    with opened(client) as page:
        ask(page, "Hi")
        expect(page.locator(".answer.busy .text")).to_have_text("Hello")
        page.keyboard.press("Escape")
        expect(answered(page)).to_have_text("Hello")
        until(lambda: client.running == 0)
        assert client.cancelled == [(0, 0)]
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_what_a_model_writes_is_text(opened: Opens) -> None:
    with opened(StubClient(says(HOSTILE))) as page:
        ask(page, HOSTILE)
        text = answered(page)
        assert text.locator("p, pre").all_inner_texts() == [
            HOSTILE.split("\n\n")[0],
            "<svg onload=\"document.title='run'\">",
            HOSTILE.split("\n\n")[2],
        ]
        assert page.locator("#log img, #log script, #log svg, #log a").count() == 0
        assert page.title() == "photon_ext"


def test_html_in_a_text_would_not_run_either(opened: Opens, faults: list[str]) -> None:
    """The policy of the page: no text becomes HTML or a script, and nobody else is asked."""
    with opened(StubClient(says("Hi"))) as page:
        refused = page.evaluate("""async () => {
          const found = new Set();
          document.addEventListener(
            "securitypolicyviolation", event => found.add(event.effectiveDirective));
          try { document.body.innerHTML = "<b>x</b>"; } catch { }
          try { await fetch("http://localhost:9/"); } catch { }
          const image = document.createElement("img");
          image.src = "http://localhost:9/";
          await new Promise(resolve => { image.onerror = () => setTimeout(resolve); });
          return [...found].sort();
        }""")
    assert refused == ["connect-src", "img-src", "require-trusted-types-for"]
    faults.clear()


def test_settings_go_with_a_request_as_they_were_typed(opened: Opens) -> None:
    client = StubClient(says("Hi"))
    with opened(client) as page:
        page.get_by_label("Model").select_option("poet")
        page.get_by_label("System prompt").fill("Be kind.")
        for label, value in (("Temperature", ".5"), ("Top p", "0.9"), ("Max tokens", "40")):
            page.get_by_label(label).fill(value)
        page.get_by_label("Seed").fill(str(2**64 - 1))
        page.get_by_label("Stop at one").fill("two words\nend")
        page.get_by_label("Reasoning").select_option("off")
        page.get_by_label("JSON schema").fill(json.dumps(ORDERED))
        page.get_by_label("Message").fill("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        answered(page)
    (asked,) = client.asks
    params = asked.params
    assert asked.adapter == "poet"
    assert (params["temperature"], params["top_p"], params["max_new_tokens"]) == (0.5, 0.9, 40)
    assert params["seed"] == 2**64 - 1
    assert json.dumps(params["json_schema"]) == json.dumps(ORDERED)
    prompt = text_of([*asked.ids])
    assert "system\nBe kind.<|im_end|>" in prompt
    assert "user\none\ntwo<|im_end|>" in prompt
    assert prompt.endswith("</think>\n\n")  # as the template does without reasoning


def test_turns_are_kept_asked_again_and_forgotten(opened: Opens) -> None:
    client = StubClient(says("<think>\nhm\n</think>\n\nBlue."))
    with opened(client) as page:
        ask(page, "Sky?")
        expect(answered(page)).to_have_text("Blue.")
        thought = page.locator("details.thought p")
        expect(thought).not_to_be_visible()
        page.get_by_text("Reasoning", exact=True).first.click()
        expect(thought).to_have_text("hm")
        ask(page, "Sea?")
        page.get_by_role("button", name="Ask again").click()
        until(lambda: len(client.asks) == 3)
        answered(page)
        page.get_by_role("button", name="New chat").click()
        ask(page, "Sun?")
        answered(page)
    first, second, again, new = (text_of([*one.ids]) for one in client.asks)
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n"))
    assert "<|im_start|>assistant\nBlue.<|im_end|>" in second  # and no thought
    assert again == second
    assert "Sky?" not in new


def test_a_key_is_asked_for_and_kept(opened: Opens) -> None:
    with opened(StubClient(says("Hi")), api_keys=("right",)) as page:
        for key, why in (("wrong", "asks for an API key"), ("right", "does not know")):
            expect(page.get_by_role("dialog")).to_contain_text(why)
            page.get_by_role("textbox", name="API key").fill(key)
            page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).not_to_be_visible()
        ask(page, "Hi")
        expect(answered(page)).to_have_text("Hi")
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        expect(page.get_by_role("dialog")).not_to_be_visible()


def test_errors_are_told_in_words(opened: Opens) -> None:
    client = StubClient(says("Hello there.", fails_after=5))
    with opened(client) as page:
        alert, message = page.get_by_role("alert"), page.get_by_label("Message")
        temperature = page.get_by_label("Temperature")
        for given, told in (
            ("warm", "Temperature is “warm”; give a number."),
            ("-1", "temperature"),
        ):
            temperature.fill(given)
            ask(page, "Hi")
            expect(alert).to_contain_text(told)
            expect(temperature).to_be_focused()
            expect(message).to_have_value("Hi")  # nothing is lost
        temperature.fill("")
        page.get_by_label("JSON schema").fill("{")
        ask(page, "Hi")
        expect(alert).to_contain_text("The schema is no JSON")
        page.get_by_label("JSON schema").fill("")
        client.refusal = busy()
        ask(page, "Hi")
        expect(alert).to_contain_text("The server is full")
        expect(alert).to_contain_text("Try again in 2 s.")
        client.refusal, client.state = None, "gone"
        ask(page, "Hi")
        expect(alert).to_contain_text("The server cannot answer now")
        client.state = "ready"
        ask(page, "Hi")
        expect(page.locator(".answer .fault")).to_contain_text("The answer broke off")
        expect(answered(page)).to_have_text("Hello")
        page.context.set_offline(True)
        ask(page, "Hi")
        expect(alert).to_contain_text("The server cannot be reached")


def test_figures_are_live_while_somebody_can_see_them(tab: Any, opened: Opens) -> None:
    looks = 0

    async def stats() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return {**await StubClient.stats(client), "tokens": 100 * looks, "uptime_s": looks}

    def show(hidden: bool) -> None:
        tab.evaluate(
            """hidden => {
              Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    client = StubClient(says("Hi"))
    client.stats = stats  # type: ignore[method-assign]
    tab.clock.install(time=0)
    with opened(client) as page:
        page.clock.pause_at(3600_000)
        expect(page.locator("#rate")).to_have_text("100")
        expect(page.locator("#running")).to_have_text("0")
        show(hidden=True)
        before = looks
        page.clock.run_for(60_000)
        assert looks == before
        with page.expect_response("**/metrics"):
            show(hidden=False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(tab: Any, opened: Opens, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    client = StubClient(says("Text\n\n```\ncode\n```", fails_after=12))
    with opened(client) as page:
        ask(page, "Hi")
        expect(page.locator(".answer .fault")).to_be_visible()
        parts = ("h1", ".user p", ".answer p", ".answer pre", ".note", ".answer .fault", "#send")
        for part in (*parts, ".figures dt", ".hint", "aside label", "aside small", "#new"):
            text, behind = map(luminance, page.evaluate(COLOURS, part))
            assert (text < behind) == ((scheme == "light") == (part != "#send")), part
            assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) > 4.5, part


def luminance(colour: list[float]) -> float:
    """Relative luminance of WCAG 2, 0..1."""
    shares = [value / 255 for value in colour]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_nothing_is_wider_than_a_phone(tab: Any, opened: Opens) -> None:
    tab.set_viewport_size({"width": 360, "height": 640})
    wide = "w" * 200
    with opened(StubClient(says(f"{wide}\n\n```\n{wide}\n```"))) as page:
        ask(page, wide)
        answered(page)
        for part in ("html", "#log"):
            assert page.locator(part).evaluate("each => each.scrollWidth") == 360
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("System prompt")).to_be_focused()
        assert page.locator("html").evaluate("each => each.scrollWidth") == 360
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).not_to_be_visible()


def test_every_control_has_a_name(opened: Opens) -> None:
    with opened(StubClient(says("Hi"))) as page:
        for control in page.locator("button, input, select, textarea").all():
            named = control.evaluate(
                "each => each.ariaLabel ?? each.labels?.[0]?.textContent ?? each.textContent"
            )
            assert named.strip()


def test_a_real_engine_keeps_the_schema_and_gives_the_row_back(
    tab: Any, model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with Server(model, "--chat-template", str(template), app=None) as server:
        tab.goto(f"http://127.0.0.1:{server.port}/")
        tab.get_by_label("JSON schema").fill(json.dumps(SCHEMA))
        ask(tab, "Which?")
        jsonschema.validate(json.loads(answered(tab).inner_text()), SCHEMA)
        tab.get_by_label("JSON schema").fill(json.dumps(ENDLESS))
        ask(tab, "Go on.")
        expect(tab.locator(".answer.busy .text")).not_to_be_empty()
        until(lambda: held(server) == 1)
        tab.get_by_role("button", name="Stop").click()
        until(lambda: held(server) == 0)
        tab.goto("about:blank")


def held(server: Server) -> float:
    """Rows in use."""
    text = server._ask("GET", "/metrics").read().decode()
    (line,) = (line for line in text.splitlines() if line.startswith("photon_rows_held "))
    return float(line.split()[1])
