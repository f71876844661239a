"""Take the screenshots of the web page for docs/images: a small store about an island, the bundled model, a browser.

Needs chromium, playwright and pillow. `python scripts/screenshots.py FOLDER` keeps the store in the folder.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PROMPT = "When fog comes down on Harrow Skerry, the keeper"
CHOSEN = " Grey"
SCORED = (
    "The lamp of the lighthouse on Harrow Skerry is lit an hour before sunset, and its light turns once in twelve "
    "seconds. Old Tamsin Vey has kept it for thirty years. When fog comes down, she rings the bell they call the "
    "Grey Widow three times in every minute. The ferry from Port Ellery sails on Tuesdays and Fridays."
)

ISLAND = {
    "lighthouse.md": """The lighthouse on Harrow Skerry was built in 1871 by Josiah Penhale. It is forty-one metres high
and painted white with two red bands. The lamp of the lighthouse on Harrow Skerry is lit an hour before sunset and put
out an hour after sunrise. Its light turns once in twelve seconds and is seen for nineteen miles. The lamp of the
lighthouse on Harrow Skerry burns rapeseed oil to this day, because Tamsin Vey will not have electric light in the
tower.""",
    "keeper.md": """Tamsin Vey has been the keeper of the lighthouse on Harrow Skerry for thirty-one years. Her mother,
Morwenna Vey, kept it before her. Tamsin Vey climbs the two hundred and six steps of the tower four times a night. She
writes the weather into the log at every hour, and she has never missed one. When Tamsin Vey is ill, her nephew Jory
keeps the lamp.""",
    "fog.md": """When fog comes down on Harrow Skerry, the keeper rings the bell that is called the Grey Widow three
times in every minute. The Grey Widow was cast in Port Ellery in 1880 and weighs eleven hundredweight. It was paid for
by the widows of the Anna Maria, which was lost on the Teeth in fog. The bell is rung by hand, for as long as the fog
lasts.""",
    "ferry.md": """The ferry from Port Ellery to Harrow Skerry sails on Tuesdays and Fridays at a quarter past seven in
the morning. It is called the Sandpiper, and its captain is Idris Cole. The crossing takes fifty minutes when the sea is
calm. The ferry does not sail when the wind is above force seven. Letters and oil for the lamp go with the ferry on
Fridays.""",
    "tides.md": """The tide at Harrow Skerry rises six metres at the springs. At low water a causeway of black stones
joins the Skerry to the islet of Little Harrow, and it may be crossed for two hours. The tide table is painted on the
door of the boathouse by Tamsin Vey every new year. The causeway must not be crossed when the Grey Widow is rung.""",
    "birds.md": """Storm petrels nest in the walls of the old lighthouse on Harrow Skerry from May to September. They
come to land only at night. The keeper counts them on the first night of July: in the last year there were three hundred
and twelve. A lamp that is lit an hour before sunset does not trouble the petrels, but a torch does, so visitors are
asked to walk without one.""",
    "log-1987.txt": """14 October. Wind south-west, force nine. The lamp of the lighthouse is lit an hour before sunset
as always. The Sandpiper did not sail. 15 October. Wind force eleven. Two panes of the lantern are broken; the lamp
burns. Mother rang the Grey Widow until four in the morning. 16 October. Calm. Captain Cole brought glass and oil from
Port Ellery.""",
    "kitchen.md": """Keeper's bread: a pound of barley flour, a handful of dulse, a spoon of honey, salt, and water from
the cistern. Tamsin Vey bakes it on Mondays, before the ferry comes on Tuesdays. It keeps until Friday, when the
Sandpiper brings flour from Port Ellery. Petrels like the crumbs, but should not have them.""",
}


def main(arguments: list[str]) -> None:
    """Build the store if it does not exist, serve it, and take the screenshots."""
    if arguments:
        take(Path(arguments[0]))
        return
    with tempfile.TemporaryDirectory() as folder:
        take(Path(folder))


def take(folder: Path) -> None:
    """Take all screenshots."""
    store = folder / "harrow-skerry"
    if not store.exists():
        texts = folder / "texts"
        texts.mkdir(parents=True, exist_ok=True)
        for name, text in ISLAND.items():
            (texts / name).write_text(" ".join(text.split()))
        knnlm = [sys.executable, "-m", "knnlm"]
        subprocess.run([*knnlm, "build", "texts", "--out", str(store)], check=True, cwd=folder)
    command = [sys.executable, "-m", "knnlm", "serve", str(store), "--port", "0", "--lambda", "0.5", "--k", "64"]
    with subprocess.Popen(
        [*command, "--knn-temperature", "6"], stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "500"}
    ) as server:
        try:
            assert server.stderr is not None
            address = next(line for line in server.stderr if ": serving " in line).split()[-1]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                for name, settings in VIEWS.items():
                    photograph(browser, address, name, **settings)
                browser.close()
        finally:
            server.terminate()


VIEWS: dict[str, dict[str, Any]] = {
    "generate-light": {"scheme": "light", "size": (1280, 900), "tab": "generate"},
    "generate-dark": {"scheme": "dark", "size": (1280, 900), "tab": "generate"},
    "score-light": {"scheme": "light", "size": (1280, 1000), "tab": "score"},
    "documents-light": {"scheme": "light", "size": (1280, 1000), "tab": "documents"},
    "phone-light": {"scheme": "light", "size": (360, 780), "tab": "generate"},
    "phone-dark": {"scheme": "dark", "size": (360, 780), "tab": "score"},
}


def photograph(browser: Browser, address: str, name: str, *, scheme: Any, size: tuple[int, int], tab: str) -> None:
    """Use the page and save its screenshot."""
    width, height = size
    small = width < 600
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=2 if small else 1
    )
    page = context.new_page()
    page.goto(f"{address}/#{tab}")
    page.wait_for_selector("html[data-ready]")
    {"generate": generate, "score": score, "documents": list_documents}[tab](page)
    page.mouse.move(0, 0)
    if not small:
        page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(400)
    picture = Image.open(io.BytesIO(page.screenshot()))
    # A page has few colours, and a palette takes a third of the bytes.
    picture.convert("RGB").quantize(256).save(IMAGES / f"{name}.png", optimize=True)
    context.close()


def generate(page: Page) -> None:
    """Generate a text without and with the store, and select a token that comes from the store."""
    page.fill("#prompt", PROMPT)
    page.fill("#length", "34")
    page.click("#go")
    page.wait_for_selector("#go:not([disabled])", timeout=300_000)
    words = page.eval_on_selector_all("#text-with .token", "all => all.map(one => one.textContent)")
    select(page, "text-with", words.index(CHOSEN) if CHOSEN in words else 0)


def score(page: Page) -> None:
    """Score a text, and select the token with the largest gain."""
    page.fill("#given", SCORED)
    page.click("#measure")
    page.wait_for_selector("#scored:not([hidden])", timeout=300_000)
    page.click("#best button")
    if page.viewport_size is not None and page.viewport_size["width"] > 600:
        page.evaluate("scrollTo(0, 0)")


def select(page: Page, text: str, place: int) -> None:
    """Select a token."""
    token = page.locator(f"#{text} .token").nth(place)
    token.scroll_into_view_if_needed()
    token.click()


def list_documents(page: Page) -> None:
    """Show the documents."""
    page.wait_for_selector("#document-list li")


if __name__ == "__main__":
    main(sys.argv[1:])
