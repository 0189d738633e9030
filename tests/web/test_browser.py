"""The pages in a real browser: ways through them, keyboard, widths, colours, and accessibility."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, expect
from support.web_trees import BAD_OPERATOR, TRAINING_BAD, TRAINING_RANKS, name_operators

from .conftest import AXE, SHOTS, PageMaker, WebServer

NAME = next(name for name, _ in name_operators() if BAD_OPERATOR in name)
RANK, ITERATION = TRAINING_BAD
TENSOR = "/tensor?" + urlencode(
    {"name": NAME, "side": "output", "slot": 0, "rank": RANK, "iteration": ITERATION}
)
QUERY = "/query?" + urlencode(
    {"sql": "SELECT iteration, max(l2norm) AS norm FROM tensors GROUP BY 1 ORDER BY 1"}
)
PAGES = {
    "overview": "/",
    "tensors": "/tensors",
    "tensor": TENSOR,
    "modules": "/modules",
    "ranks": "/ranks",
    "differences": "/ranks?statistic=fingerprint_differences&tensors=all",
    "order": "/order",
    "diff": "/diff",
    "black box": "/blackbox",
    "query": QUERY,
    "error": "/tensors?search=nothing+like+it",
}
DIFF = "/diff?a=0&b=1"
MAX_SHOT_BYTES = 150_000


def test_way_from_the_overview_to_the_source_line(open_page: PageMaker):
    """One click leads from the verdict to the line that made the NaN."""
    page = open_page("/")
    expect(page.locator("h1")).to_contain_text("first value that is not finite: rank 2")
    page.locator("table a").first.click()
    expect(page.locator(".code .hit")).to_contain_text("weights = scores.softmax(dim=-1)")
    expect(page.locator("h1 .mark")).to_have_text("not finite")


def test_way_over_the_map_and_the_list(open_page: PageMaker):
    """A click on a cell of the map lists the tensors of that place; three clicks to the line."""
    page = open_page("/ranks?statistic=nonfinite")
    box = page.locator("img[data-map]").bounding_box()
    assert box is not None
    x = box["x"] + box["width"] * (ITERATION + 0.5) / 16
    page.mouse.click(x, box["y"] + box["height"] * (RANK + 0.5) / TRAINING_RANKS)
    page.wait_for_url("**/tensors?*")
    assert f"rank={RANK}&iteration={ITERATION}" in page.url
    page.locator("tr.bad a").first.click()
    expect(page.locator(".code .hit")).to_be_visible()


def test_modules_are_loaded_when_they_are_opened(open_page: PageMaker):
    page = open_page("/modules")
    address = page.locator("details[hx-get]").first.get_attribute("hx-get")
    closed = page.locator(f'details[hx-get="{address}"]')
    expect(closed.locator(".mark.bad").first).to_be_visible()
    with page.expect_response(lambda answer: "under=encoder" in answer.url):
        closed.locator("summary").first.click()
    expect(closed.locator(".part summary").first).to_be_visible()


def test_plots_are_drawn_from_their_tables(open_page: PageMaker):
    for path in (TENSOR, QUERY):
        page = open_page(path)
        expect(page.locator(".plot canvas")).to_be_visible()
        assert page.locator("table[data-plot] tbody tr").count() == 16


def test_keyboard_alone_leads_to_the_source_line(open_page: PageMaker):
    page = open_page("/")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?*")
    expect(page.locator(".code .hit")).to_be_visible()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("softmax")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensors?search=softmax")
    page.keyboard.press("n")
    page.wait_for_url("**after=*")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator("tbody tr").first).to_have_class("selected")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_url("**/order")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).not_to_be_visible()


def test_walk_through_the_difference_of_two_trees(open_page: PageMaker, pair_server: WebServer):
    """The comparison is started on the page, which shows it when it is done."""
    page = open_page("/diff", at=pair_server)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("h2.verdict")).to_contain_text(
        "NaN or infinity in a starts at", timeout=60_000
    )
    expect(page.locator("#comparison")).to_contain_text("Softmax")
    page.keyboard.press("n")
    page.wait_for_url(lambda address: "row=" in address)
    first = page.url
    page.keyboard.press("d")
    page.wait_for_url(lambda address: "row=" in address and address != first)
    expect(page.locator("tr[aria-current]")).to_have_count(1)
    page.get_by_role("link", name="b", exact=True).first.click()
    expect(page.locator("h1")).to_be_visible()
    assert "tree=1" in page.url
    page = open_page(DIFF, at=pair_server, width=800)
    expect(page.locator("h2.verdict")).to_be_visible(timeout=60_000)
    overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overhang) == 0
    assert list_serious_faults(page) == []
    page = open_page(DIFF, at=pair_server, width=1200, height=680)
    expect(page.locator("h2.verdict")).to_be_visible(timeout=60_000)
    take_picture(page, "diff")


def test_operators_are_paired_by_hand(open_page: PageMaker, renamed_server: WebServer):
    """With the keyboard: one operator of each side, then the file; and both sides of a pair."""
    page = open_page("/diff?a=0&b=1&verdicts=unmatched", at=renamed_server)
    button = page.get_by_role("button", name="Pair")
    expect(button.first).to_be_visible(timeout=60_000)
    button.first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**pick_*")
    expect(page.get_by_role("status")).to_contain_text(
        "is paired with the operator of", timeout=60_000
    )
    button.last.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(lambda address: "pick_a" in address and "pick_b" in address)
    download = page.get_by_role("link", name="Download mapping.json")
    expect(download).to_be_visible(timeout=60_000)
    with page.expect_download() as waiting:
        download.click()
    assert json.loads(Path(waiting.value.path()).read_text()) == {
        "Default/network-Net/mlp-Old/GeLU-op0": "Default/network-Net/ffn-New/QuickGelu-op0"
    }
    page.get_by_role("link", name="all", exact=True).click()
    page.get_by_role("button", name="Show both sides").first.click()
    expect(page.locator(".both-sides")).to_contain_text("digest")
    assert list_serious_faults(page) == []
    overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overhang) == 0


def test_way_from_the_map_of_differences_to_the_comparison(
    open_page: PageMaker, pair_server: WebServer
):
    page = open_page("/ranks?statistic=fingerprint_differences&against=1", at=pair_server)
    box = page.locator("img[data-map]").bounding_box()
    assert box is not None
    x = box["x"] + box["width"] * (ITERATION + 0.5) / 16
    page.mouse.click(x, box["y"] + box["height"] * (RANK + 0.5) / TRAINING_RANKS)
    page.wait_for_url("**/diff?*")
    places = f"rank_a={RANK}&rank_b={RANK}&iteration_a={ITERATION}&iteration_b={ITERATION}"
    assert places in page.url
    expect(page.locator("h2.verdict")).to_contain_text("NaN or infinity in a", timeout=60_000)


def test_trace_of_the_order_is_downloaded(open_page: PageMaker):
    page = open_page("/order")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="the entries below").click()
    assert waiting.value.suggested_filename.startswith("order_iteration_1_from_")
    trace = json.loads(Path(waiting.value.path()).read_text())
    assert {each["ph"] for each in trace["traceEvents"]} == {"M", "X"}


def test_first_key_of_tab_skips_to_the_content(open_page: PageMaker):
    page = open_page("/tensors")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


@pytest.mark.parametrize("width", [800, 1280, 2560])
def test_pages_fit_their_width(open_page: PageMaker, width: int):
    for path in PAGES.values():
        page = open_page(path, width=width)
        overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overhang) == 0, path


def test_colours_are_those_of_the_system(open_page: PageMaker):
    find = "getComputedStyle(document.documentElement).backgroundColor"
    colors = {scheme: open_page("/", scheme=scheme).evaluate(find) for scheme in ("light", "dark")}
    assert colors == {"light": "rgb(251, 251, 250)", "dark": "rgb(19, 22, 25)"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_serious_is_inaccessible(open_page: PageMaker, name: str, scheme: str):
    assert list_serious_faults(open_page(PAGES[name], scheme=scheme)) == []


def list_serious_faults(page: Page) -> list[Any]:
    found: Any = run_axe(page)
    assert len(found["passes"]) > 10
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"]])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def run_axe(page: Page) -> Any:
    # Evaluated by the protocol of the debugger, which the policy of the page does not bind.
    page.evaluate(AXE.read_text())
    return page.evaluate("axe.run()")


def test_policy_stops_a_script_in_the_page(server: WebServer, browser: Browser):
    """A script that gets into a page all the same is not run."""
    context = browser.new_context()
    context.add_cookies(server.cookies)
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(server.base + "/")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('img'), "
        "{src: 'https://example.org/x.png'}))"
    )
    page.wait_for_function("document.images.length > 0 && document.images[0].complete")
    assert any("Content Security Policy" in text for text in refused)
    context.close()


def test_token_works_once_and_for_one_browser(server: WebServer, browser: Browser):
    context = browser.new_context()
    page = context.new_page()
    for path, words in ((server.address, "used already"), (server.base, "no access")):
        answer = page.goto(path)
        assert answer is not None
        assert (answer.status, words in answer.text()) == (403, True)
    context.close()


@pytest.mark.parametrize(
    ("name", "path", "scheme"),
    [
        ("overview", "/", "light"),
        ("tensor", TENSOR, "light"),
        ("modules", "/modules?under=encoder%2Flayers%2F0", "dark"),
        ("ranks", "/ranks", "light"),
    ],
)
def test_screenshots(open_page: PageMaker, name: str, path: str, scheme: str):
    """They are those of docs/web.md when WEB_SCREENSHOTS=docs/images."""
    page = open_page(path, width=1200, height=760, scheme=scheme)
    page.wait_for_load_state("networkidle")
    take_picture(page, name)


def take_picture(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = SHOTS / f"web-{name}.png"
    page.screenshot(path=shot)
    assert shot.stat().st_size <= MAX_SHOT_BYTES
