"""The page in a real browser, on a real server: it shows the probabilities and sources of the API."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from helpers.models import tiny, tiny_tokenizer
from helpers.pairs import pair_lm, pairs
from helpers.server import Running, serving
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.auth import ApiKeys

PROMPT = "The memory of a model"
TEXT = "The memory of a model is a list of rooms, and each context asked Anna about the library."
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
SETTINGS = {"k": 32, "knn_temperature": 4.0, "lmbda": 0.4}
USER, ADMIN = "user-key-1234", "admin-key-1234"


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, or the one that CHROMIUM names."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "The page is tested in a browser. Run: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(lm, store):
    with serving(Mixture.open(store.path, lm, **SETTINGS)) as running:
        yield running


def open_page(browser: Browser, server: Running, tab: str = "generate", *, ready: bool = True, **settings) -> Page:
    """Open the page in a new context, and record its errors and requests."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.errors = []
    page.requested = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
    page.on("request", lambda request: page.requested.append((request.method, request.url)))
    page.goto(f"{server.url}/#{tab}")
    if ready:
        page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture
def checked():
    """Close pages at the end, and check that they loaded only from the server and had no errors."""
    pages: list[tuple[Page, Running, bool]] = []

    def register(page: Page, server: Running, *, errors: bool = False) -> Page:
        pages.append((page, server, errors))
        return page

    yield register
    for page, server, errors in pages:
        assert all(url.startswith(server.url) for _, url in page.requested)
        assert errors or page.errors == []
        page.context.close()


def shown(page: Page, text: str, figure: str) -> list[float]:
    """Return the numbers by which a text's tokens are coloured."""
    return page.eval_on_selector_all(f"#{text} .token", f"all => all.map(one => Number(one.dataset.{figure}))")


def token_texts(page: Page, text: str) -> list[str]:
    return page.eval_on_selector_all(f"#{text} .token", "all => all.map(one => one.textContent)")


def generate(page: Page, prompt: str = PROMPT, *, length: int = 12) -> None:
    page.fill("#prompt", prompt)
    page.fill("#length", str(length))
    page.click("#go")
    page.wait_for_selector("#go:not([disabled])")


def slide(page: Page, name: str, part: float) -> None:
    """Move a slider to a position from 0 to 1000."""
    page.locator(f"#slider-{name}").evaluate(
        "(one, part) => { one.value = part; one.dispatchEvent(new Event('input')); }", part
    )


def completion(server: Running, **body) -> list[dict]:
    """Return the tokens of a completion, without the page."""
    request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1, "sources": 8, **body}
    return server.post("/v1/completions", **request)["choices"][0]["knnlm"]["tokens"]


def test_texts_with_and_without_memory_are_coloured_by_share(browser, server, checked):
    page = checked(open_page(browser, server), server)
    generate(page)
    having, without = completion(server), completion(server, memory={"off": True})
    assert token_texts(page, "text-with") == [token["text"] for token in having]
    assert token_texts(page, "text-without") == [token["text"] for token in without]
    shares = [token["weight"] * token["p_knn"] / token["p"] for token in having]
    np.testing.assert_allclose(shown(page, "text-with", "share"), shares, atol=6e-4)
    assert set(shown(page, "text-without", "share")) == {0.0}
    assert page.inner_text("#text-with .given") == PROMPT
    own = np.exp(-np.mean(np.log([token["p"] for token in having])))
    assert f"12 tokens · perplexity {own:.3g}" in page.inner_text("#figures-with")
    page.uncheck("#compare", force=True)
    generate(page, length=3)
    assert not page.is_visible("#pane-without")
    assert len(token_texts(page, "text-with")) == 3


def test_both_texts_are_sampled_with_one_seed(browser, server, checked):
    page = checked(open_page(browser, server), server)
    page.fill("#sampling", "1")
    page.fill("#seed", "7")
    slide(page, "lambda", 0)  # the memory has no weight, so both texts must be equal
    generate(page, length=20)
    assert token_texts(page, "text-with") == token_texts(page, "text-without")
    drawn = completion(server, temperature=1.0, seed=7, max_tokens=20, memory={"off": True})
    assert token_texts(page, "text-without") == [token["text"] for token in drawn]
    assert token_texts(page, "text-without") != [token["text"] for token in completion(server, max_tokens=20)]


def test_arrow_keys_select_tokens_and_show_probabilities_and_neighbours(browser, server, store, checked):
    page = checked(open_page(browser, server), server)
    generate(page)
    tokens = completion(server)
    page.locator("#text-with .token").first.focus()
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 11), ("Home", 0)):
        page.keyboard.press(key)
        token = tokens[place]
        for name, figure in (("p_lm", "p_LM"), ("p_knn", "p_kNN"), ("p", "p")):
            assert read(page.inner_text(f'[data-figure="{figure}"]')) == pytest.approx(token[name], rel=0.06, abs=6e-4)
    neighbours = page.locator(".neighbours li")
    assert neighbours.count() == len(tokens[0]["sources"]) == 8
    parts = page.eval_on_selector_all(
        ".neighbours .fill", "all => all.map(one => Number(one.style.getPropertyValue('--fraction')))"
    )
    np.testing.assert_allclose(parts, [source["weight"] for source in tokens[0]["sources"]], atol=1e-6)
    agree = page.eval_on_selector_all(".neighbours li", "all => all.map(one => one.classList.contains('agrees'))")
    assert agree == [source["token"] == tokens[0]["text"] for source in tokens[0]["sources"]]


def read(figure: str) -> float:
    """Return a probability from the page's format."""
    digits, _, power = figure.partition("·10")
    return float(digits) * 10 ** int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)


def test_document_of_a_neighbour_opens_at_its_passage(browser, server, checked):
    page = checked(open_page(browser, server), server)
    generate(page)
    source = completion(server)[3]["sources"][0]
    page.locator("#text-with .token").nth(3).click()
    page.locator(".neighbours .document").first.click()
    expect(page.locator("#passage")).to_be_visible()
    text = {document.id: document.text for document in documents(40)}[source["document"]]
    assert page.inner_text("#passage-title") == source["document"]
    assert page.locator("#passage-text").text_content().removesuffix("<eos>") == text
    assert page.locator("#passage-text mark").text_content() == source["token"].strip()
    assert source["before"][-20:] in page.locator("#passage-text").text_content()
    page.keyboard.press("Escape")
    expect(page.locator("#passage")).to_be_hidden()


def test_long_document_can_be_read_in_both_directions(browser, lm, tmp_path, checked):
    long = documents(1, words=500)[0].text
    build([Document(id="long", source="long", text=long)], tmp_path / "store", lm=lm).close()
    with serving(Mixture.open(tmp_path / "store", lm, **SETTINGS)) as server:
        page = checked(open_page(browser, server, "documents"), server)
        page.click("#document-list .document")
        expect(page.locator("#earlier")).to_be_disabled()
        for _ in range(20):
            if page.is_disabled("#later"):
                break
            place = page.inner_text("#passage-place")
            page.click("#later")
            expect(page.locator("#passage-place")).not_to_have_text(place)
        whole = page.locator("#passage-text").text_content()
        assert whole.removesuffix("<eos>") == long
        sources = completion(server, max_tokens=1)[0]["sources"]
        deep, row = max(enumerate(source["entry"] for source in sources), key=lambda each: each[1])
        assert row > 400  # the text repeats itself, so some neighbour is far inside
        page.keyboard.press("Escape")
        page.click("#tab-generate")
        generate(page, length=1)
        page.locator("#text-with .token").first.click()
        page.locator(".neighbours .document").nth(deep).click()
        expect(page.locator("#passage-text mark")).to_have_text(sources[deep]["token"].strip())
        expect(page.locator("#passage-place")).to_contain_text(f"tokens {row - 200 + 1:,}–")
        while page.is_enabled("#earlier"):
            place = page.inner_text("#passage-place")
            page.click("#earlier")
            expect(page.locator("#passage-place")).not_to_have_text(place)
        assert long.startswith(page.locator("#passage-text").text_content()[:1000])


def test_sliders_rescore_a_text_without_running_the_model(browser, server, checked):
    page = checked(open_page(browser, server), server)
    generate(page)
    before = completion(server)
    page.requested.clear()
    with page.expect_response("**/v1/rescore"):
        slide(page, "lambda", 900)
    p = [0.1 * token["p_lm"] + 0.9 * token["p_knn"] for token in before]
    shares = [0.9 * token["p_knn"] / own for token, own in zip(before, p, strict=True)]
    expect(page.locator("#figures-with")).to_contain_text(f"perplexity {np.exp(-np.mean(np.log(p))):.3g}")
    np.testing.assert_allclose(shown(page, "text-with", "share"), shares, atol=6e-4)
    assert page.inner_text("#value-lambda") == "0.90"
    assert {url.removeprefix(server.url) for _, url in page.requested} == {"/v1/rescore"}
    with page.expect_response("**/v1/rescore"):
        page.click("#reset")
    own = np.exp(-np.mean(np.log([token["p"] for token in before])))
    expect(page.locator("#figures-with")).to_contain_text(f"perplexity {own:.3g}")


def test_sliders_of_k_and_temperature_equal_a_score_with_them(browser, server, checked):
    page = checked(open_page(browser, server, "score"), server)
    page.fill("#given", TEXT)
    page.click("#measure")
    page.wait_for_selector("#scored:not([hidden])")
    with page.expect_response("**/v1/rescore"):
        slide(page, "k", 300)
    k = int(page.inner_text("#value-k"))
    assert 1 < k < 32
    with page.expect_response("**/v1/rescore"):
        slide(page, "knn_temperature", 800)
    temperature = 4.0 / 100 * (100 * 100) ** 0.8
    again = server.post("/v1/score", text=TEXT, memory={"k": k, "knn_temperature": temperature}, sources=6)
    # At the first position the beginnings of all documents are equally near, so those among k are arbitrary.
    gains = [np.log(token["p"] / token["p_lm"]) for token in again["knnlm"]["tokens"]][1:]
    expect(page.locator("#text-score .token").nth(1)).to_have_attribute("data-gain", f"{gains[0]:.3f}")
    np.testing.assert_allclose(shown(page, "text-score", "gain")[1:], gains, atol=2e-3)
    page.locator("#text-score .token").nth(5).click()
    sources = again["knnlm"]["tokens"][5]["sources"]
    parts = page.eval_on_selector_all(
        ".neighbours .fill", "all => all.map(one => Number(one.style.getPropertyValue('--fraction')))"
    )
    np.testing.assert_allclose(parts[: len(sources)], [source["weight"] for source in sources], atol=1e-4)


def test_slider_of_k_is_limited_to_retrieved_neighbours(browser, server, checked):
    page = checked(open_page(browser, server), server)
    generate(page, length=3)
    slide(page, "k", 1000)
    expect(page.locator("#mixing-note")).to_contain_text("Only 32 neighbours were retrieved")
    generate(page, length=3)
    slide(page, "k", 900)
    expect(page.locator("#mixing-note")).to_contain_text("without running the model")
    assert int(page.inner_text("#value-k")) > 32


def test_score_shows_where_the_memory_helps_and_hurts(browser, server, lm, store, checked):
    page = checked(open_page(browser, server, "score"), server)
    page.fill("#given", TEXT)
    page.click("#measure")
    page.wait_for_selector("#scored:not([hidden])")
    explained = Mixture.open(store.path, lm, **SETTINGS).explain(TEXT)
    gains = np.log([token.p / token.p_lm for token in explained])
    assert "".join(token_texts(page, "text-score")) == TEXT
    np.testing.assert_allclose(shown(page, "text-score", "gain"), gains, atol=2e-3)
    for name, wanted in (("helps", gains > 0.05), ("hurts", gains < -0.05)):
        has = page.eval_on_selector_all(
            "#text-score .token", f"all => all.map(one => one.classList.contains('{name}'))"
        )
        assert has == wanted.tolist()
    for field, each in (("perplexity-without", "p_lm"), ("perplexity-with", "p")):
        wanted = np.exp(-np.mean(np.log([getattr(token, each) for token in explained])))
        assert float(page.inner_text(f"#{field}").replace(",", "")) == pytest.approx(wanted, rel=6e-3)
    for name, gain in (("best", gains.max()), ("worst", gains.min())):
        page.locator(f"#{name} button").first.click()
        looked = page.locator("#text-score .token.selected")
        assert float(looked.get_attribute("data-gain")) == pytest.approx(gain, abs=2e-3)
        assert page.evaluate("document.activeElement.textContent") == looked.text_content()


def test_server_error_is_shown(browser, lm, store, checked):
    with serving(Mixture.open(store.path, lm, **SETTINGS), prompt_tokens=20) as server:
        page = checked(open_page(browser, server), server, errors=True)
        generate(page, TEXT * 3)
        expect(page.get_by_role("alert")).to_contain_text("but this server takes 20 at most. Shorten it.")
        generate(page, "The")
        expect(page.get_by_role("alert")).to_have_text("")
        page.click("#tab-score")
        page.fill("#given", TEXT * 3)
        page.click("#measure")
        expect(page.get_by_role("alert")).to_contain_text("Shorten it.")
        page.click("#notices button")
        expect(page.get_by_role("alert")).to_have_text("")
    page.click("#measure")
    expect(page.get_by_role("alert")).to_contain_text("The server does not respond.")


def test_stop_button_frees_the_server(browser, lm, tmp_path, checked):
    model = tiny("llama")
    model.config.max_position_embeddings = 4096
    model.generation_config.eos_token_id = None  # it would go on for half a minute
    endless = CausalLM(model, tiny_tokenizer(), name="endless")
    build(documents(3), tmp_path / "store", lm=endless).close()
    with serving(Mixture.open(tmp_path / "store", endless, **SETTINGS)) as server:
        page = checked(open_page(browser, server), server)
        page.fill("#prompt", PROMPT)
        page.fill("#length", "4000")
        page.click("#go")
        page.wait_for_selector("#text-with .token")
        page.click("#stop")
        page.wait_for_selector("#go:not([disabled])")
        assert page.get_by_role("alert").inner_text() == ""
        assert 0 < len(token_texts(page, "text-with")) < 4000
        end = time.monotonic() + 10
        while server.service.scheduler.active and time.monotonic() < end:
            page.wait_for_timeout(50)
        assert server.service.scheduler.active == 0
        slide(page, "lambda", 900)  # what was written before can be weighed too
        expect(page.locator("#mixing-note")).to_contain_text("without running the model")


@pytest.fixture(scope="module")
def hostile(lm, tmp_path_factory):
    """A server of a store whose documents contain markup."""
    path = tmp_path_factory.mktemp("hostile") / "store"
    made = [
        Document(id=f"{HOSTILE}{one.id}", source=f"{HOSTILE}:1", text=f"{HOSTILE} {one.text}") for one in documents(3)
    ]
    build(made, path, lm=lm).close()
    with serving(Mixture.open(path, lm, k=16, knn_temperature=4.0, lmbda=0.9)) as running:
        yield running


def test_markup_in_documents_and_prompts_is_shown_as_text(browser, hostile, checked):
    page = checked(open_page(browser, hostile), hostile)
    generate(page, HOSTILE, length=30)
    assert page.locator("#text-with .given").text_content() == HOSTILE
    page.locator("#text-with .token").nth(4).click()
    assert HOSTILE in page.locator(".neighbours .document").first.text_content()
    page.locator(".neighbours .document").first.click()
    expect(page.locator("#passage-title")).to_contain_text(HOSTILE)
    assert HOSTILE in page.locator("#passage-text").text_content()
    page.keyboard.press("Escape")
    page.click("#tab-score")
    page.fill("#given", HOSTILE)
    page.click("#measure")
    page.wait_for_selector("#scored:not([hidden])")
    assert "".join(token_texts(page, "text-score")) == HOSTILE
    page.click("#tab-documents")
    expect(page.locator("#document-list li").first).to_contain_text(HOSTILE)
    page.locator("#document-list li button.quiet").first.click()
    expect(page.locator("#confirm-text")).to_contain_text(HOSTILE)
    assert page.locator("main img, dialog img, main script").count() == 0
    assert page.title() == "docs · knnlm"


def test_content_security_policy_blocks_injected_scripts(browser, server, checked):
    page = checked(open_page(browser, server), server, errors=True)
    page.evaluate("document.getElementById('work').insertAdjacentHTML('beforeend', " + json.dumps(HOSTILE) + ")")
    page.wait_for_timeout(200)
    assert page.title() == "docs · knnlm"
    assert any("Content Security Policy" in error for error in page.errors)


@pytest.mark.parametrize("tab", ["generate", "score", "documents"])
def test_page_fits_a_phone(browser, hostile, checked, tab):
    page = checked(open_page(browser, hostile, tab, viewport={"width": 360, "height": 740}, has_touch=True), hostile)
    if tab == "generate":
        generate(page, "A" * 60, length=10)
        page.locator("#text-with .token").nth(2).tap()
        expect(page.locator("#inspector")).to_be_in_viewport()
        page.click("#inspector-close")
        expect(page.locator("#inspector")).to_be_hidden()
    if tab == "score":
        page.fill("#given", "B" * 60)
        page.click("#measure")
        page.wait_for_selector("#scored:not([hidden])")
    if tab == "documents":
        page.wait_for_selector("#document-list li")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_theme_follows_the_system_until_it_is_switched(browser, server, checked):
    def background(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    dark = checked(open_page(browser, server, color_scheme="dark"), server)
    light = checked(open_page(browser, server, color_scheme="light"), server)
    assert background(dark) < 120 < 600 < background(light)
    light.click("#theme")
    assert background(light) == background(dark)
    light.reload()
    assert background(light) == background(dark)


def test_page_can_be_used_by_keyboard_alone(browser, server, checked):
    page = checked(open_page(browser, server), server)
    page.locator("#tab-generate").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-score"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    expect(page.locator("#score")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.locator("#prompt").focus()
    page.keyboard.type(PROMPT)
    page.fill("#length", "5")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#text-with .token >> nth=4")
    page.wait_for_selector("#go:not([disabled])")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#text-with') !== null"):
            break
    assert page.evaluate("document.activeElement.className").startswith("token")
    outline = (
        "(one) => { const own = getComputedStyle(one); return [own.outlineStyle, own.outlineWidth, own.outlineColor]; }"
    )
    ring = ["solid", "2px", "rgb(91, 75, 214)"]
    assert page.locator("#text-with .token:focus .word").evaluate(outline) == ring
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#text-with .token.selected").text_content() == token_texts(page, "text-with")[1]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#text-with')") is None


def test_keys_are_requested_and_not_stored(browser, lm, store, checked):
    keys = ApiKeys(users=(USER.encode(),), admins=(ADMIN.encode(),))
    with serving(Mixture.open(store.path, lm, **SETTINGS), keys=keys) as server:
        page = checked(open_page(browser, server, ready=False), server, errors=True)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-value", "not-the-key")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("The API key is missing or wrong.")
        expect(page.locator("#key")).to_be_visible()
        page.click("#notices button")  # it lies over the dialog, where it can be reached
        page.fill("#key-value", USER)
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready]")
        generate(page, length=2)
        assert len(token_texts(page, "text-with")) == 2
        page.click("#tab-documents")
        page.fill("#admin", ADMIN)
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert USER not in kept
        assert ADMIN not in kept
        page.reload()
        expect(page.locator("#key")).to_be_visible()


def test_documents_can_be_listed_searched_and_read(browser, server, checked):
    page = checked(open_page(browser, server, "documents"), server)
    expect(page.locator("#total")).to_have_text("40")
    rows = page.locator("#document-list li")
    assert rows.count() == 40
    sizes = [f"{one['tokens']} tokens" for one in server.client().get("/v1/documents").json()["documents"]]
    assert rows.locator(".size").all_inner_texts() == sizes
    page.fill("#search", "d1")
    expect(page.locator("#total")).to_have_text("11")
    assert rows.locator(".document").all_inner_texts() == [d.id for d in documents(40) if "d1" in d.id]
    page.fill("#search", "nothing like that")
    expect(page.locator("#nothing")).to_be_visible()
    page.fill("#search", "text.jsonl:40")
    expect(rows).to_have_count(1)
    rows.locator(".document").click()
    expect(page.locator("#passage-text")).to_contain_text(documents(40)[-1].text)


def drop(page: Page, name: str, text: str) -> None:
    """Drop a file onto the page, with the events of a browser."""
    page.evaluate(
        """([name, text]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([text], name, { type: "text/plain" }));
            const dispatch = (kind) => document.getElementById("drop").dispatchEvent(
                new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
            dispatch("dragenter"); dispatch("dragover"); dispatch("drop");
        }""",
        [name, text],
    )


@pytest.fixture
def writable_server(lm, tmp_path):
    """A server of its own store, which the admin key may change."""
    build(documents(6), tmp_path / "store", lm=lm).close()
    keys = ApiKeys(admins=(ADMIN.encode(),))
    with serving(Mixture.open(tmp_path / "store", lm, **SETTINGS), keys=keys) as running:
        yield running


def neighbour_documents(page: Page) -> set[str]:
    """Return the documents with neighbours of any token of the generated text."""
    shown_documents = set()
    for token in page.locator("#text-with .token").all():
        token.focus()
        shown_documents.update(page.locator(".neighbours .document").all_inner_texts())
    return shown_documents


def test_dropped_file_is_retrieved_and_removed_file_is_not(browser, writable_server, checked):
    page = checked(open_page(browser, writable_server, "documents"), writable_server, errors=True)
    drop(page, "news.txt", "Zyx quux! Zyx quux! Zyx quux!")
    expect(page.get_by_role("alert")).to_contain_text("The admin key is missing or wrong.")
    expect(page.locator("#added")).to_contain_text("news.txt: not added.")
    page.fill("#admin", ADMIN)
    drop(page, "news.txt", "Zyx quux! Zyx quux! Zyx quux!")
    expect(page.locator("#added")).to_contain_text("tokens added.")
    expect(page.get_by_role("alert")).to_have_text("")
    expect(page.locator("#total")).to_have_text("7")
    drop(page, "again.txt", "Zyx quux! Zyx quux! Zyx quux!")
    expect(page.locator("#added")).to_contain_text("again.txt: this text is in the store already.")
    page.click("#tab-generate")
    generate(page, "Zyx quux! Zyx qu", length=3)
    assert "news.txt" in neighbour_documents(page)
    page.click("#tab-documents")
    page.get_by_role("button", name="Remove news.txt").click()
    expect(page.locator("#confirm-text")).to_contain_text("news.txt")
    page.get_by_role("button", name="Remove it").click()
    expect(page.locator("#total")).to_have_text("6")
    assert "news.txt" not in page.locator("#document-list").inner_text()
    page.click("#tab-generate")
    generate(page, "Zyx quux! Zyx qu", length=3)
    assert "news.txt" not in neighbour_documents(page)


@pytest.mark.parametrize("way", ["button", "escape", "beside"])
def test_removal_needs_a_confirmation(browser, writable_server, checked, way):
    page = checked(open_page(browser, writable_server, "documents"), writable_server)
    page.fill("#admin", ADMIN)
    page.get_by_role("button", name="Remove d3").click()
    expect(page.locator("#confirm")).to_be_visible()
    assert page.evaluate("document.activeElement.textContent") == "Cancel"  # Enter does no harm
    if way == "button":
        page.get_by_role("button", name="Cancel").click()
    elif way == "escape":
        page.keyboard.press("Escape")
    else:
        page.mouse.click(5, 5)
    expect(page.locator("#confirm")).to_be_hidden()
    page.wait_for_timeout(300)
    assert [url for method, url in page.requested if method == "DELETE"] == []
    page.get_by_role("button", name="Remove d4").click()
    page.get_by_role("button", name="Remove it").click()
    expect(page.locator("#total")).to_have_text("5")
    assert [url.rsplit("/", 1)[1] for method, url in page.requested if method == "DELETE"] == ["4"]
    listed = page.locator("#document-list .document").all_inner_texts()
    assert listed == ["d0", "d1", "d2", "d3", "d5"]


CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {  // any way of writing a colour, as the browser paints it
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
    const behind = (element) => {
        const layers = [];
        for (let one = element; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
        return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
    };
    const found = [];
    const note = (element, colour, text) => {
        const under = behind(element);
        found.push([text.trim().slice(0, 40), over(rgba(colour), under), under]);
    };
    for (const element of document.querySelectorAll("body *")) {
        if (!element.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true }) || element.disabled) continue;
        if (element.placeholder && !element.value) {
            note(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
        }
        const own = [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim());
        if (own.length) note(element, getComputedStyle(element).color, own[0].textContent);
    }
    return found;
}"""


def contrast(one: list[float], other: list[float]) -> float:
    """Return the contrast of two colours, by the formula of WCAG 2."""

    def luminance(colour: list[float]) -> float:
        parts = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser, writable_server, checked, scheme):
    """At least 4.5 to 1 between a text and its background, in every theme."""
    page = checked(
        open_page(browser, writable_server, color_scheme=scheme, reduced_motion="reduce"), writable_server, errors=True
    )
    assert contrast([255, 255, 255], [0, 0, 0]) == pytest.approx(21)

    def check(least: int) -> None:
        found = page.evaluate(CONTRAST)
        assert len(found) >= least
        poor = [(text, round(contrast(*colours), 2)) for text, *colours in found if contrast(*colours) < 4.5]
        assert poor == []

    for turned in (False, True):
        if turned:  # to the other scheme and, in the end, back
            page.click("#theme")
        page.click("#tab-generate")
        check(15)
        generate(page, length=8)
        page.locator("#text-with .token").nth(3).click()
        check(40)
        page.click("#tab-score")
        page.fill("#given", TEXT)
        page.click("#measure")
        page.wait_for_selector("#scored:not([hidden])")
        check(40)
        page.click("#tab-documents")
        page.wait_for_selector("#document-list li")
        page.fill("#admin", "")
        drop(page, "news.txt", "Zyx quux!")
        expect(page.get_by_role("alert")).to_contain_text("The admin key is missing or wrong.")
        page.fill("#admin", ADMIN)
        drop(page, f"{scheme}-{turned}.txt", f"Zyx quux {turned}!")
        expect(page.locator("#added .done").first).to_be_visible()
        page.get_by_role("button", name="Remove d3").click()
        expect(page.locator("#confirm")).to_be_visible()
        check(30)
        page.get_by_role("button", name="Cancel").click()


def test_binary_file_is_not_sent(browser, writable_server, checked):
    page = checked(open_page(browser, writable_server, "documents"), writable_server)
    page.fill("#admin", ADMIN)
    page.set_input_files("#files", {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff\x00"})
    expect(page.get_by_role("alert")).to_contain_text("picture.png is not UTF-8 text")
    assert not [method for method, _ in page.requested if method == "POST"]


def test_rejected_file_does_not_stop_the_others(browser, writable_server, checked):
    page = checked(open_page(browser, writable_server, "documents"), writable_server)
    page.fill("#admin", ADMIN)
    files = [
        {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff\x00"},
        {"name": "huge.txt", "mimeType": "text/plain", "buffer": b"word " * (600 << 10)},
        {"name": "good.txt", "mimeType": "text/plain", "buffer": b"Zyx quux!"},
    ]
    page.set_input_files("#files", files)
    expect(page.locator("#total")).to_have_text("7")
    lines = page.locator("#added li").all_inner_texts()
    assert [line.partition(":")[0] for line in lines] == ["good.txt", "huge.txt", "picture.png"]
    assert "tokens added" in lines[0]
    assert "larger than the limit of 2,097,152 bytes" in lines[1]
    assert "not UTF-8 text" in lines[2]


def test_wrong_key_is_reported_for_every_file(browser, writable_server, checked):
    page = checked(open_page(browser, writable_server, "documents"), writable_server, errors=True)
    files = [{"name": f"{n}.txt", "mimeType": "text/plain", "buffer": b"Zyx quux!"} for n in range(3)]
    page.set_input_files("#files", files)
    expect(page.locator("#added li")).to_have_count(3)
    assert all("not added." in line for line in page.locator("#added li").all_inner_texts())
    assert len([method for method, _ in page.requested if method == "POST"]) == 1


@pytest.fixture(scope="module")
def tuned_server(lm, tmp_path_factory):
    """A server whose store was tuned, so that tokens have a support."""
    path = build(documents(20), tmp_path_factory.mktemp("tuned") / "docs.store", lm=lm).path
    untuned = Mixture.open(path, lm, memories="knn,cache,ngram", use_tuned=False)
    untuned.tune(documents(10, start=100), ks=[8, 32], knn_temperatures=[4.0, 16.0])
    with serving(Mixture.open(path, lm)) as running:
        yield running


def test_support_is_shown_until_a_slider_changes_the_weights(browser, tuned_server, server, checked):
    page = checked(open_page(browser, tuned_server), tuned_server)
    generate(page, length=20)
    tokens = completion(tuned_server, max_tokens=20)
    low = [token["support"] < 0.5 for token in tokens]
    marked = "all => all.map(one => one.classList.contains('unsupported'))"
    assert page.eval_on_selector_all("#text-with .token", marked) == low
    assert not any(page.eval_on_selector_all("#text-without .token", marked))  # the model alone has no support
    share = round(100 * (1 - sum(low) / len(low)))
    assert page.inner_text("#figures-with").endswith(f"{share} % supported")
    expect(page.locator("#legend-support")).to_be_visible()
    page.locator("#text-with .token").nth(5).click()
    assert read(page.inner_text('[data-figure="right"]')) == pytest.approx(tokens[5]["support"], rel=0.06, abs=6e-4)
    slide(page, "lambda", 700)
    expect(page.locator("#figures-with")).not_to_contain_text("supported")
    assert not any(page.eval_on_selector_all("#text-with .token", marked))
    plain = checked(open_page(browser, server), server)
    generate(plain)
    expect(plain.locator("#legend-support")).to_be_hidden()


PAIRS = pairs(24)


@pytest.fixture
def pair_server(tmp_path):
    lm = pair_lm("marian")
    build(PAIRS, tmp_path / "pairs.store", lm=lm).close()
    mixture = Mixture.open(tmp_path / "pairs.store", lm, k=8, knn_temperature=4.0, lmbda=0.6)
    with serving(mixture, keys=ApiKeys((), (ADMIN.encode(),)), output_tokens=40) as running:
        yield running


def translation(server: Running, source: str, **options) -> dict:
    return server.post("/v1/translate", text=source, **options)["translations"][0]


def test_store_of_pairs_is_translated_and_shows_the_pairs_behind_each_token(browser, pair_server, checked):
    page = checked(open_page(browser, pair_server, "score"), pair_server)
    assert page.inner_text("#tab-generate") == page.inner_text("#go") == "Translate"
    assert not page.is_visible("#tab-score")
    assert not page.is_visible("#score")
    assert page.inner_text("#prompt-label") == "Source text"
    assert page.input_value("#length") == "40"
    source = PAIRS[3].source_text
    generate(page, source)
    right, alone = (
        translation(pair_server, source, sources=8, max_tokens=12),
        translation(pair_server, source, tokens=True, memory={"off": True}, max_tokens=12),
    )
    tokens = right["knnlm"]["tokens"]
    assert token_texts(page, "text-with") == [token["text"] for token in tokens]
    assert page.locator("#text-with").text_content() == right["text"]
    assert page.locator("#text-without").text_content() == alone["text"]
    shares = [token["weight"] * token["p_knn"] / token["p"] for token in tokens]
    np.testing.assert_allclose(shown(page, "text-with", "share"), shares, atol=6e-4)
    page.locator("#text-with .token").nth(1).click()
    found = page.eval_on_selector_all(".neighbours .pair-source", "all => all.map(one => one.textContent)")
    assert found == [each["source_text"] for each in tokens[1]["sources"]]
    contexts = page.eval_on_selector_all(".neighbours .context mark", "all => all.map(one => one.textContent)")
    assert contexts == [each["token"].strip() for each in tokens[1]["sources"]]
    page.locator(".neighbours .document").first.click()
    expect(page.locator("#passage")).to_be_visible()
    assert page.inner_text("#passage-pair") == tokens[1]["sources"][0]["source_text"]
    page.keyboard.press("Escape")
    page.fill("#beams", "3")
    generate(page, source)
    assert page.locator("#text-with").text_content() == translation(pair_server, source, beams=3, max_tokens=12)["text"]


def test_sliders_rescore_a_translation(browser, pair_server, checked):
    page = checked(open_page(browser, pair_server), pair_server)
    generate(page, PAIRS[3].source_text)
    before = shown(page, "text-with", "share")
    assert max(before) > 0.2
    with page.expect_response("**/v1/rescore"):
        slide(page, "lambda", 0)
    page.wait_for_function(
        "() => [...document.querySelectorAll('#text-with .token')].every(one => one.dataset.share === '0.000')"
    )
    assert ("POST", f"{pair_server.url}/v1/rescore") in page.requested


def test_pairs_are_added_from_a_file(browser, pair_server, checked, tmp_path):
    page = checked(open_page(browser, pair_server, "documents"), pair_server, errors=True)
    page.fill("#admin", ADMIN)
    (tmp_path / "new.tsv").write_text("das Zebra\tthe zebra\n\ndie Anna\tAnna sleeps\n")
    page.set_input_files("#files", tmp_path / "new.tsv")
    expect(page.locator("#added li").first).to_contain_text("new.tsv: 2 pairs with")
    page.fill("#search", "DIE ANNA")
    expect(page.locator("#document-list .document")).to_have_count(1)
    assert page.inner_text("#document-list small") == "die Anna"
    page.click("#document-list .document")
    expect(page.locator("#passage-pair")).to_have_text("die Anna")
    assert page.inner_text("#passage-text").startswith("Anna sleeps")
    page.keyboard.press("Escape")
    (tmp_path / "bad.tsv").write_text("das Zebra\n")
    page.set_input_files("#files", tmp_path / "bad.tsv")
    expect(page.locator("#added li").first).to_contain_text("bad.tsv, line 1: a pair is a source, one tab")
