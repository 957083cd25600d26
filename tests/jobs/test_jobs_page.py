"""The page, as the server gives it, and in a real browser without a screen."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jobs_harness import Server
from support.patience import PATIENCE
from support.requiring import require_modules, require_programs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOR_EVER = str(10**9)
MILLISECONDS = 1000 * PATIENCE


def in_a_browser(test: Any) -> Any:
    return pytest.mark.full(pytest.mark.gate(test))


def test_the_page_is_open_and_asks_nobody_else(of_the_file: Server) -> None:
    host, port = of_the_file.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript")):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200 and answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for path in ("/page/../jobs.py", "/page/%2e%2e/client.py", "/page/nothing.js", "/page"):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (401, 404)
    connection.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require_modules("playwright")
    require_programs(chromium="chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser, of_the_file: Server) -> Iterator[Page]:
    """One that knows the token; at its end: nobody else was asked, and nothing went wrong."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(MILLISECONDS)
    found = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    found.goto(of_the_file.client.page)
    yield found
    assert wrong == []
    assert asked and all(url.startswith(of_the_file.url) for url in asked)
    context.close()


@pytest.fixture(scope="module")
def jobs(of_the_file: Server) -> dict[str, int]:
    """Two runs that are over, one that failed, and one that goes on."""
    submit, wait = of_the_file.submit, of_the_file.client.wait
    found = {
        "slow": submit("watched.py", "0.01", "300", ranks=2, name="slow"),
        "fast": submit("watched.py", "0.03", "300", ranks=2, name="fast"),
        "failed": submit("fails.py", ranks=2),
    }
    assert [wait(job)["state"] for job in found.values()] == ["done", "done", "failed"]
    found["live"] = submit("watched.py", "0.001", FOR_EVER, ranks=2, name="live")
    return found


def shows(page: Page, part: str, *texts: str) -> None:
    """Wait until a part of the page has these texts."""
    for text in texts:
        page.locator(part, has_text=text).first.wait_for()


def chosen(page: Page, *jobs: int) -> None:
    page.evaluate("ids => { location.hash = `jobs=${ids}` }", ",".join(map(str, jobs)))
    for job in jobs:
        shows(page, "h2", f"{job} ")


def number(page: Page, name: str) -> float:
    return float(page.locator("dl div", has_text=name).first.locator("dd").inner_text())


@in_a_browser
def test_a_job_that_trains_is_seen_to_move(
    page: Page, of_the_file: Server, jobs: dict[str, int]
) -> None:
    shows(page, "nav tbody tr", "live", "slow", "failed")
    page.locator("nav a", has_text="live").click()
    shows(page, "#connection", "live")
    shows(page, "dl", "running", "iterations/s")
    shows(page, "figcaption", "loss", "accuracy", "rate")
    before = number(page, "iteration")
    page.wait_for_function(
        "n => Number(document.querySelector('dl').innerText.match(/iteration\\s+(\\d+)/)[1]) > n",
        arg=before,
    )
    shows(page, "section.ranks", "Rank 1 is late", "iterations/s", "MiB")
    assert page.locator("section.ranks tbody tr").count() == 2
    assert page.locator("section.layers tbody tr").count() == 3
    assert page.locator("section.links td.link").count() == 4
    # What programs write stays text.
    shows(page, "section.log pre", "<b>so it begins</b>")
    drawn = page.locator("figure canvas").first.evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert drawn > 2
    points = "c => document.querySelector('.u-legend').innerText"
    assert "loss" in page.evaluate(points)
    of_the_file.client.send(jobs["live"], "stop")
    shows(page, "dl", "done")
    shows(page, "section.events", "command stop", "obeyed stop", "done")
    shows(page, "section.layers", "in the whole run")


@in_a_browser
def test_runs_side_by_side(page: Page, jobs: dict[str, int]) -> None:
    chosen(page, jobs["slow"])
    page.get_by_label(f"show job {jobs['fast']} beside").check()
    shows(page, "h2", "slow", "fast")
    shows(page, ".u-legend", f"{jobs['slow']} slow", f"{jobs['fast']} fast")
    shows(page, "figcaption", "constructor")  # of one of them alone
    page.select_option("#metric", "accuracy")
    page.fill("#value", "0.9")
    reached = page.locator("section.metrics table tbody tr", has=page.locator("td:nth-child(3)"))
    shows(page, "section.metrics table", f"{jobs['slow']} slow")
    iterations = [row.locator("td").nth(1).inner_text() for row in reached.all()][-2:]
    assert iterations == ["230", "76"]  # the first where 0.99**n, 0.97**n <= 0.1
    page.fill("#value", "0.999")
    shows(page, "section.metrics td", "not yet")
    page.select_option("#axis", "time")
    shows(page, ".u-legend", "time")


@in_a_browser
def test_a_failed_job_shows_its_flight_record(page: Page, jobs: dict[str, int]) -> None:
    chosen(page, jobs["failed"])
    shows(page, "dl", "failed: its program ended with 5")
    shows(page, "section.log pre", "PeerLostError")
    page.locator("section.flight-records summary", has_text="rank-0").click()
    shows(page, "section.flight-records pre", "plan_start")


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(page: Page, jobs: dict[str, int], scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 740})
    for job in jobs.values():
        chosen(page, job)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
    assert (int(ground[0]) > 128) == (scheme == "light")
    stroke = page.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--line-0')"
    )
    assert stroke.strip() == {"light": "#1f66bf", "dark": "#6aa8f0"}[scheme]


@in_a_browser
def test_the_token_is_asked_for(browser: Browser, of_the_file: Server) -> None:
    context = browser.new_context()
    context.set_default_timeout(MILLISECONDS)
    page = context.new_page()
    page.goto(of_the_file.url)
    for token in ("wrong", "\u20ac"):
        page.fill("#token", token)
        page.get_by_role("button", name="Watch").click()
        shows(page, "#refusal", "does not know this token")
        page.locator("#login").wait_for(state="visible")
    page.fill("#token", of_the_file.token)
    page.get_by_role("button", name="Watch").click()
    shows(page, "#connection", "live")
    page.reload()  # who serves it now might be another
    page.locator("#login").wait_for(state="visible")
    page.goto("about:blank")
    page.goto(of_the_file.client.page)
    shows(page, "#connection", "live")
    assert of_the_file.token not in page.url
    context.close()


@in_a_browser
def test_a_server_that_comes_back(browser: Browser, make_server: Any) -> None:
    first = make_server()
    first.start()
    port = first.url.rsplit(":", 1)[1]
    context = browser.new_context()
    context.set_default_timeout(MILLISECONDS)
    page = context.new_page()
    page.goto(first.client.page)
    shows(page, "#connection", "live")
    shows(page, "nav", "There are no jobs")
    first.kill()
    page.wait_for_selector("#connection.trouble")
    first.start([*first.command(), f"--port={port}"])
    job = first.submit(name="later")
    shows(page, "#connection", "live")
    shows(page, "nav tbody tr", "later")
    shows(page, "h2", f"{job} later")
    context.close()
