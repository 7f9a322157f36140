"""The page in a real browser: Chromium, headless. Debian: apt-get install chromium chromium-driver."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.synthetic import hostile_run, records, wave, write_pair, write_run

import fedkeep as fk
from fedkeep.reports.page import write
from fedkeep.reports.watch import serve
from fedkeep.runs.reading import write_instruments

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One Chromium, and helpers to read and operate a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, width: int = 1280, scheme: str = "light") -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        preferences = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}  # no smooth scrolling
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in preferences.items()])
        self.errors(), self.requests()  # discard those of the previous page
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)

    def cdp(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def __call__(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return self("[...document.querySelectorAll(arguments[0])].map(node => node.textContent.trim())", selector)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    def wait(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < end, "the condition was not met in time"
            time.sleep(0.05)
        return result


def start(folder: Path) -> Browser:
    """Start Chromium. If it is not installed, skip the tests, or fail if FEDKEEP_REQUIRE_BROWSER is set."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        webdriver = None
    if not (program and driver and webdriver):
        reason = f"needs chromium ({program}), chromedriver ({driver}) and selenium ({webdriver and 'there'})"
        (pytest.fail if os.environ.get("FEDKEEP_REQUIRE_BROWSER") else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Browser(webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start(tmp_path_factory.mktemp("profile"))
    yield started
    started.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write([write_pair(folder / "runs")], folder / "page.html")
    return folder / "page.html"


def test_recoverable_forgetting_is_shown_where_it_was_recorded(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    assert not browser.find("#recoverable").is_displayed()
    write_pair(tmp_path / "runs")
    for run in (tmp_path / "runs").iterdir():
        classes = len(fk.load_run(run, weights=False).class_accuracy[0])
        study = {
            "fitted_on": "half of the test set",
            "n_fitted": 5,
            "n_measured": 6,
            "accuracy": {"before": 0.4, "after": 0.8},
        }
        study |= {"bias": [1.0] + [-0.5] * (classes - 1), "after": [0.8] * classes}
        write_instruments(
            run, [{"after_round": t, "recoverable": {**study, "before": [0.6 / t] * classes}} for t in (1, 2, 3)]
        )
    write([tmp_path / "runs"], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert len(browser.texts("#recoverable .plot path")) == 8, "accuracy and forgetting, before and after, of two runs"
    assert len(browser.texts("#recoverable canvas")) == 2
    assert all("other half (6 examples)" in text for text in browser.texts("#recoverable figcaption:last-child"))
    assert "forgetting 40 points, 0 with the bias: 100% recoverable" in browser.texts("#recoverable h3")[0]
    assert browser.errors() == []


def test_personalised_accuracy_is_shown_where_it_was_recorded(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    assert not browser.find("#personal").is_displayed()
    write_pair(tmp_path / "runs")
    for run in (tmp_path / "runs").iterdir():
        last = fk.load_run(run, weights=False).records[-1]["round"]
        numbers = {"mean": 0.6, "spread": 0.3, "worst_tenth": 0.2, "weighted": 0.5, "took_part": 0.7, "test_set": 0.4}
        model = {**numbers, "best": 0.6, "clients": [0.2, 0.6, 1.0]}
        study = {"data": "label shares", "epochs": 2, "clients": [0, 1, 2], "left_out": 0, "never_took_part": [1]}
        study |= {"global": model, "tuned": model, "rounds": 1}
        write_instruments(run, [{"after_round": last, "personal": study}])
    write([tmp_path / "runs"], tmp_path / "page.html")
    for width in (1280, 390):
        browser.open(tmp_path / "page.html", width)
        assert len(browser.texts("#personal circle")) == 24, "three clients, two models, two methods, two seeds"
        assert len(browser.texts("#personal tbody tr")) == 4
        assert browser.texts("#personal th")[2:] == [
            "own data %", "spread", "worst tenth %", "took part %", "test set %"
        ]  # fmt: skip
        assert "all 3 clients (1 of them never took part)" in browser.texts("#personal h3")[0]
        assert browser("document.documentElement.scrollWidth <= innerWidth")
        assert browser.errors() == []


def test_the_page_renders_without_errors_or_requests(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.find("#headline").text.startswith("FedNTD ")
    assert browser.find("#facts").text.startswith("digits, 3 classes · ")
    assert len(browser.texts("#hero canvas")) == len(browser.texts("#anatomy canvas")) == 2
    assert not browser.find("#heat").is_displayed(), "it would repeat the two maps on top"
    assert len(browser.texts("#curves .plot path")) == 4  # two lines, two bands
    assert len(browser.texts("#drops svg circle")) == 2
    assert len(browser.texts("#split canvas")) == 1
    assert len(browser.texts("#summary .summary tbody tr")) == 2
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]
    assert browser("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [390, 1440])
def test_a_problem_is_selected_from_the_list(browser: Browser, tmp_path: Path, width: int) -> None:
    write_pair(tmp_path / "runs")
    for method in ("fedavg", "fedprox", "scaffold"):
        write_run(tmp_path / "runs" / method, records(wave(0, rounds=9)), method=method)
    write([tmp_path / "runs"], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", width)
    assert len(browser.texts("#problems li")) == 2
    assert len(browser.texts("#summary .summary tbody tr")) == 3
    assert browser.texts("#summary td.best") == [], "all are equal"
    browser.find("#problems li:nth-child(2) button").click()
    assert len(browser.texts("#summary .summary tbody tr")) == 2
    assert len(browser.texts("#summary td.best")) == 5
    assert "6 rounds" in browser.find("#problem").text
    assert browser("document.documentElement.scrollWidth <= innerWidth")
    assert browser.find("#headline").size["height"] < 140
    assert browser.errors() == []


def test_the_heat_map_shows_the_accuracies(browser: Browser, page: Path) -> None:
    """Class 0 of FedAvg, seed 0, falls from 0.9 to 0.3 in the last round: its cell is darker than that of class 1."""
    browser.open(page)
    script = """(() => {
        const canvas = document.querySelector('#hero figure:last-child canvas');
        const ratio = devicePixelRatio, pen = canvas.getContext('2d');
        const light = (x, y) => pen.getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3).reduce((a, b) => a + b);
        const right = canvas.clientWidth - 60;
        return [light(right, 13), light(right, 39)];
    })()"""
    lost, kept = browser(script)
    assert lost < kept


def test_the_slider_selects_the_round_of_every_method(browser: Browser, page: Path) -> None:
    browser.open(page)
    slider = browser.find("#round")
    slider.send_keys("\ue011")  # Home
    assert browser.find(".slider output").text == "1 of 6"
    slider.send_keys("\ue014")  # right
    assert browser.find(".slider output").text == "2 of 6"
    assert slider.get_attribute("aria-valuetext") == "round 2"
    labels = browser("[...document.querySelectorAll('#anatomy canvas')].map(c => c.ariaLabel)")
    assert all(", round 2:" in label for label in labels)
    browser.find("#worst").click()
    assert browser.find(".slider output").text != "2 of 6"
    assert browser.errors() == []


def test_a_selected_seed_is_shown_in_every_section(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = browser.texts("#hero h3")
    assert "Seed 0 is shown" in browser.find(".about-hero").text
    browser.find("#hero select").send_keys("1")
    assert browser("[...document.querySelectorAll('label.seeds select')].map(s => s.value)") == ["1"] * 5
    assert browser.texts("#split h3") == ["digits: shards (s 2, seed 1)"]
    assert browser.texts("#hero h3") != before
    assert browser.errors() == []


def test_heat_maps_of_the_mean_agree_with_the_bars(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.find("#hero select").send_keys("mean of 2")
    assert "Mean of 2 seeds" in browser.find(".about-hero").text
    finals = [bar.split("±")[0] for bar in browser.texts("#glance .measure span")[1::2]]
    assert [title.split("ends at ")[1].rstrip("%") for title in browser.texts("#hero h3")] == finals
    assert browser.errors() == []


def test_the_table_can_be_sorted_by_any_column(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = lambda: browser.texts("#summary .summary tbody td:first-child")  # noqa: E731
    assert names() == ["FedNTD", "FedAvg"]  # by forgetting, least first
    for key, sorts in [
        ("label", ["FedAvg", "FedNTD"]),
        ("final", ["FedNTD", "FedAvg"]),
        ("final", ["FedAvg", "FedNTD"]),
    ]:
        browser.find(f'#summary [data-key="{key}"]').click()
        assert names() == sorts
    assert browser.find("#summary th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert browser("document.activeElement.dataset.key") == "final"  # the focus stays where it was


def test_the_theme_follows_the_system_until_one_is_selected(browser: Browser, page: Path) -> None:
    def dark() -> bool:
        red = browser("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red) < 128

    browser.open(page, scheme="dark")
    assert dark()
    browser.open(page, scheme="light")
    assert not dark()
    try:
        browser.find("#theme").click()
        assert dark()
        browser.driver.refresh()
        assert dark()  # remembered
    finally:
        browser("localStorage.clear()")
    assert browser.errors() == []


def clipboard(browser: Browser, format: str) -> str:
    browser("document.querySelector('#copied').textContent = ''")
    browser.find(f'[data-copy="{format}"]').click()
    browser.wait(lambda: browser.find("#copied").text)
    return clipboard_text(browser)


def clipboard_text(browser: Browser) -> str:
    return browser.driver.execute_async_script(
        "navigator.clipboard.readText().then(arguments[0], e => arguments[0](String(e)))"
    )


def test_the_table_is_copied_in_three_formats(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    markdown = clipboard(browser, "markdown").splitlines()
    assert markdown[0].startswith("| method | final % |")
    assert markdown[2].startswith("| FedNTD | **80.8±3.5** |")
    [head, first, _] = csv.reader(io.StringIO(clipboard(browser, "csv")))
    row = dict(zip(head, first, strict=True))
    assert (row["label"], float(row["final"]), float(row["final_std"]), row["runs"]) == (
        "FedNTD",
        0.80833333,
        0.035355339,
        "2",
    )
    latex = clipboard(browser, "latex")
    assert "FedNTD & $\\mathbf{80.8 \\pm 3.5}$ &" in latex
    assert "final \\% &" in latex


def test_the_table_is_copied_without_access_to_the_clipboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser("void (navigator.clipboard.writeText = () => Promise.reject(new Error('no')))")
    browser.find('[data-copy="csv"]').click()
    browser.wait(lambda: browser.find("#copied").text)
    assert clipboard_text(browser).startswith("label,final,final_std,")


def test_the_page_can_be_used_with_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    reached = []
    for _ in range(80):
        browser.press("\ue004")  # Tab
        here = browser(
            "[document.activeElement.id || document.activeElement.tagName, document.activeElement.textContent.trim()]"
        )
        if here[0] == "BODY":
            break
        reached.append(here[0])
    for stop in ("theme", "round", "worst", "CANVAS", "svg", "SELECT", "BUTTON", "SUMMARY"):
        assert stop in reached
    browser("document.querySelector('#hero canvas').focus()")
    browser.press("\ue014")  # right: to the second round
    assert browser.find("#tooltip").text.startswith("round 2, class 0:")
    browser.press("\ue015")  # down: to the second class
    assert browser.find("#tooltip").text.startswith("round 2, class 1:")
    browser.press("\ue00c")  # Escape
    assert not browser.find("#tooltip").is_displayed()
    browser("document.querySelector('#curves .plot svg').focus()")
    browser.press("\ue014")
    assert browser.find("#tooltip").text.splitlines()[0] == "round 2"
    assert browser.errors() == []


def test_a_method_can_be_hidden_on_the_whole_page(browser: Browser, page: Path) -> None:
    browser.open(page)
    chip = lambda number: browser.find(f"#filter .chip:nth-child({number})")  # noqa: E731
    chip(2).send_keys("\ue007")  # Enter: hide FedAvg
    assert chip(2).get_attribute("aria-pressed") == "false"
    assert len(browser.texts("#curves .plot path")) == 2
    assert len(browser.texts("#hero canvas")) == len(browser.texts("#summary .summary tbody tr")) == 1
    assert "FedAvg" in browser.find("#summary .hidden-note").text
    chip(1).click()
    assert len(browser.texts("#summary .summary tbody tr")) == 1, "the last one stays"
    browser.find("#filter .plain").click()
    assert len(browser.texts("#summary .summary tbody tr")) == 2
    assert browser.errors() == []


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of nine groups; FedAvg is the seventh by rank."""
    folder = tmp_path_factory.mktemp("nine")
    for i in range(9):
        about = {"method": "fedavg"} if i == 6 else {"method": "fedprox", "hyper": {"mu": i / 10}}
        write_run(folder / "runs" / f"{i}", records(wave(0, rounds=30, depth=0.1 + i / 20)), **about)
    write([folder / "runs"], folder / "page.html")
    return folder / "page.html"


def test_of_many_methods_the_first_three_and_the_reference_are_shown(browser: Browser, nine: Path) -> None:
    browser.open(nine)
    shown = browser.texts("#summary .summary tbody td:first-child")
    assert len(shown) == 4
    assert shown[3] == "FedAvg"
    assert browser.texts("#glance .name") == [title.split(" · ")[0] for title in browser.texts("#heat h3")] == shown
    browser.find("#filter .plain").click()
    assert len(browser.texts("#summary .summary tbody tr")) == len(browser.texts("#heat canvas")) == 9
    bars = "[...document.querySelectorAll('#glance .track i')].map(i => getComputedStyle(i).backgroundColor)"
    assert len(browser(bars)) == 18
    assert len(set(browser(bars))) == 9, "no colour is used twice"
    browser.find("#filter .plain").click()
    assert browser.texts("#summary .summary tbody td:first-child") == shown
    assert browser.errors() == []


@pytest.mark.parametrize("width", [390, 1440])
def test_ticks_are_whole_rounds_with_the_last_and_do_not_touch(browser: Browser, nine: Path, width: int) -> None:
    browser.open(nine, width)
    boxes = browser(
        "[...document.querySelectorAll('#curves .plot text')].map(t => [t.textContent, t.getBoundingClientRect()])"
        ".filter(([text]) => /^[0-9]+$/.test(text)).map(([text, box]) => [+text, box.left, box.right])"
    )
    assert (boxes[0][0], boxes[-1][0]) == (1, 30)
    assert all(one[2] + 3 < other[1] for one, other in itertools.pairwise(boxes))
    points = [float(text) for text in browser.texts("#drops svg text[text-anchor=middle]")[:-1]]
    assert len({round(b - a, 6) for a, b in itertools.pairwise(points)}) == 1, "equal distances, none rounded"


def test_sections_are_saved_as_svg_and_png(browser: Browser, page: Path) -> None:
    """What the buttons would download is caught on its way."""
    browser.open(page)
    browser("void (window.download = async (blob, name) => { window.saved = [name, blob.type, await blob.text()] })")
    for section in ("hero", "glance", "curves", "anatomy", "drops", "split", "summary", "about"):
        browser("void (window.saved = null)")
        browser("void document.querySelector(arguments[0]).click()", f"#{section} [data-save=svg]")
        name, kind, text = browser.wait(lambda: browser("window.saved"))
        assert (name, kind) == (f"fedkeep-{section}.svg", "image/svg+xml")
        root = ElementTree.fromstring(text)
        assert "4 clients" in " ".join(root.itertext()), "it says what it is about"
        assert "var(" not in text, "it needs no style sheet"
        assert len(list(root.iter())) > 12
    browser("void (window.saved = null)")
    browser("void document.querySelector('#curves [data-save=png]').click()")
    name, kind, _ = browser.wait(lambda: browser("window.saved"))
    assert (name, kind) == ("fedkeep-curves.png", "image/png")
    assert browser.errors() == []


def test_the_card_has_the_result_and_the_figures(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.find("[data-share=text]").click()
    browser.wait(lambda: browser.find("#shared").text)
    lines = clipboard_text(browser).splitlines()
    assert lines[0] == browser.find("#headline").text
    assert lines[1] == browser.find("#facts").text
    assert lines[2].startswith("FedNTD: forgets ")
    assert lines[2].endswith(", ends at 80.8±3.5%")
    browser("void (document.querySelector('#shared').textContent = '')")
    browser.find("[data-share=copy]").click()
    browser.wait(lambda: browser.find("#shared").text)
    read = "navigator.clipboard.read().then(items => arguments[0](items[0].types), e => arguments[0](String(e)))"
    assert browser.driver.execute_async_script(read) == ["image/png"]
    card = browser("cardPicture(data, state).textContent")
    assert all(part in card for part in (lines[0], lines[1], "80.8±3.5%"))
    assert browser("document.querySelectorAll('.card').length") == 0
    assert browser.errors() == []


def test_printing_keeps_headings_and_legends_and_unfolds(browser: Browser, page: Path) -> None:
    browser.open(page, scheme="dark")
    browser("void dispatchEvent(new Event('beforeprint'))")
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.find("#summary .summary thead button").is_displayed()
        assert "FedNTD 80.8%" in browser.find("#curves .lines").text
        assert browser("[...document.querySelectorAll('details')].every(d => d.open)")
        assert browser("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser("document.querySelector('#summary table').scrollWidth") <= 720, "the width of a sheet of paper"
        assert not browser.find("#filter").is_displayed()
    finally:
        browser.cdp("Emulation.setEmulatedMedia", media="")
    browser("void dispatchEvent(new Event('afterprint'))")
    assert browser("[...document.querySelectorAll('details')].some(d => !d.open)")
    assert browser("document.documentElement.dataset.theme") is None
    assert browser.errors() == []


def test_classes_and_clients_have_their_names(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records(wave(0), np_local(4)))
    table = {"clients": 2, "ids": [0, 1], "counts": [[3, 0, 1], [0, 3, 1]]}
    names = {"class_names": ["<b>benign</b>", "x" * 90, "other"], "client_names": ["Aachen", "Bonn"]}
    (run / "split.json").write_text(json.dumps({**table, **names}))
    write([tmp_path], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser("document.querySelector('#hero canvas').focus()")
    browser.press("\ue014")  # right
    assert browser.find("#tooltip").text.startswith("round 2, <b>benign</b>:")
    browser("document.querySelector('#anatomy canvas').focus()")
    browser.press("\ue015")  # down: the first client
    assert browser.find("#tooltip").text.startswith("Aachen, <b>benign</b>:")
    assert browser("document.querySelectorAll('main b:not(section > p b)').length") == 0
    assert browser.errors() == []


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_horizontal_scrolling(browser: Browser, page: Path, tmp_path: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser("document.documentElement.scrollWidth") <= width
    write([hostile_run(tmp_path)], tmp_path / "hostile.html")
    browser.open(tmp_path / "hostile.html", width=width)
    assert browser("document.documentElement.scrollWidth") <= width


def test_the_plots_are_drawn_again_when_the_window_changes(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.cdp("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=2, mobile=False)
    shown = "(c => c.width / devicePixelRatio - c.clientWidth)(document.querySelector('#hero canvas'))"
    browser.wait(lambda: abs(browser(shown)) < 1)
    assert browser("document.documentElement.scrollWidth") <= 700


def test_markup_in_names_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    write([hostile_run(tmp_path)], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser("window.evil") is None
    assert "<script>window.evil=1<" in browser.find("#headline").text
    assert browser("document.querySelectorAll('img').length") == 0
    assert browser.errors() == []


def test_runs_with_few_records(browser: Browser, tmp_path: Path) -> None:
    """One run, one evaluated round, no local models, no split: what was not recorded has no section."""
    write([write_run(tmp_path / "run", records(wave(0, rounds=1)))], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert "fedavg" not in browser.find("#headline").text
    for section in ("anatomy", "split", "drops", "recoverable", "personal"):
        assert not browser.find(f"#{section}").is_displayed()
        assert not browser.find(f'nav a[href="#{section}"]').is_displayed()
    assert not browser.find("#filter").is_displayed()
    assert browser.errors() == []


def test_many_classes_clients_and_methods(browser: Browser, tmp_path: Path) -> None:
    import numpy as np

    for i in range(9):
        accuracy = np.clip(wave(0, classes=100, rounds=30) - i / 30, 0, 1)
        local = np.zeros((30, 50, 100))
        write_run(tmp_path / f"run{i}", records(accuracy, local), train={"rounds": 30, "lr": 0.1 * i})
    write([tmp_path], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.find("#filter .plain").click()
    assert len(browser.texts("#heat canvas")) == 9
    assert " 10 " in browser.texts("#anatomy figcaption")[0], "40 of the 50 clients are shown"
    assert browser.errors() == []


def test_a_watched_run_is_updated_without_reloading(browser: Browser, tmp_path: Path) -> None:
    lines = records(wave(0, rounds=6), np_local(6))
    run = write_run(tmp_path / "run", lines[:1], rounds=6)
    with serve([run], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        assert "fedavg" not in browser.find("#headline").text
        browser("void (window.mark = 1)")
        for t in (3, 6):
            (run / "rounds.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines[: t + 1]) + '{"round": '
            )
            browser.wait(lambda t=t: f"{t} of 6" in browser.find("#live").text)
            assert browser.find("#headline").text.startswith("FedAvg ")
            assert browser(f"document.querySelector('#round').max == {t - 1}")
        assert browser("window.mark") == 1  # the same page
        assert browser.errors() == []
        server.shutdown()
    browser.wait(lambda: "lost" in browser.find("#live").get_attribute("class"))
    browser.open("about:blank")


def np_local(rounds: int) -> list:
    return [[[0.5, 0.5, 0.5]] * 2] * rounds
