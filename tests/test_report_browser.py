"""The report in a real browser: what a person sees, and does."""

import base64
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pdvi
from pdvi import report
from test_pl import slide
from test_report import HOSTILE, with_counts

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
NO_BROWSER = "no Chromium with its driver; Debian has them as chromium and chromium-driver"
pytestmark = [pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NO_BROWSER), pytest.mark.slow]
ALONE = (  # nothing in the background that would reach for a network
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
COUNT = """
const canvas = document.getElementById("tissue");
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const wanted = arguments[0].map((hex) => parseInt(hex.slice(1), 16)), counts = wanted.map(() => 0);
const places = wanted.map(() => null);
for (let i = 0; i < data.length; i += 4) {
  const k = wanted.indexOf(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  if (k < 0) continue;
  counts[k]++;
  if (counts[k] === arguments[1]) places[k] = [i / 4 % canvas.width, Math.floor(i / 4 / canvas.width)];
}
return [counts, places.map((at) => at && at.map((each) => each * canvas.clientWidth / canvas.width))];
"""

SPAN = """
const canvas = document.getElementById("tissue"), wide = canvas.width;
const data = canvas.getContext("2d").getImageData(0, 0, wide, canvas.height).data;
let left = wide, right = 0;
for (let i = 0; i < data.length; i += 4) if (data[i] + data[i + 1] + data[i + 2] < 765) {
  left = Math.min(left, i / 4 % wide);
  right = Math.max(right, i / 4 % wide);
}
return right - left;
"""
DARKNESS = """
const canvas = document.getElementById("tissue"), wide = canvas.width / 5;
return [0, 1, 2, 3, 4].map((k) => {
  const data = canvas.getContext("2d").getImageData(k * wide, 0, wide, canvas.height).data;
  return data.reduce((sum, value, i) => sum + (i % 4 === 0 ? 255 - value : 0), 0);
});
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in ALONE:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def tissue(n=900, n_domains=5):
    adata = with_counts(slide(n, n_domains=n_domains))
    names = [HOSTILE, *(f"layer {k}" for k in range(2, n_domains + 1))]
    adata.obs["domain"] = adata.obs["domain"].cat.rename_categories(names)
    adata.obs["domain_certainty"] = np.linspace(0, 1, n)
    adata.obs["slice"] = pd.Categorical(np.where(adata.obsm["spatial"][:, 0] < 150, HOSTILE, "right"))
    adata.uns["domain_colors"] = pdvi.pl.palette(n_domains)
    adata.uns["domain"] |= {"elbo": -1.0, "params": {"n_domains": n_domains, "sample_key": HOSTILE}}
    return adata


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(tissue(), path, sample_key="slice", title=HOSTILE)
    return path


@pytest.fixture
def opened(browser, file):
    return shown(browser, file)


def shown(browser, file, width=1200, height=900, *, dark=False):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(file.as_uri())
    WebDriverWait(browser, 60).until(
        lambda d: d.execute_script("return document.getElementById('tissue').dataset.ready === 'yes'")
    )
    settled(browser)
    return browser


def settled(browser):
    """Two frames later everything that was asked for is painted."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
    )


def counts(browser, colors=None, nth=1):
    settled(browser)
    return browser.execute_script(COUNT, colors or pdvi.pl.palette(5), nth)


def picture(browser):
    settled(browser)
    return browser.execute_script("return document.getElementById('tissue').toDataURL()")


def complaints(browser):
    """What the console says, but for its advice on reading pixels, which only these tests do."""
    return [entry for entry in browser.get_log("browser") if entry["source"] != "rendering"]


def hover(browser, place):
    canvas = browser.find_element(By.ID, "tissue")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    box = canvas.rect
    across, down = place[0] - box["width"] / 2, place[1] - box["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, round(across), round(down)).perform()
    settled(browser)
    return browser.find_element(By.ID, "tip").text


def test_every_domain_is_seen_in_its_color(opened):
    seen, _ = counts(opened)
    assert min(seen) > 500
    assert max(seen) < 2 * min(seen)  # stripes of the same width


def test_hovering_tells_the_domain_its_certainty_and_its_genes(opened):
    _, places = counts(opened, nth=300)
    for k, name in enumerate([HOSTILE, "layer 2", "layer 3", "layer 4", "layer 5"]):
        told = hover(opened, places[k]).splitlines()
        assert told[0] == f"Domain {name}"
        assert any(line.startswith("certainty ") for line in told)
        assert any(line.startswith(f"Gene{k}: ") for line in told)
    assert hover(opened, [2, 2]) == ""


def test_a_domain_is_switched_off_and_on(opened):
    before, _ = counts(opened)
    boxes = opened.find_elements(By.CSS_SELECTOR, "#legend input")
    boxes[2].click()
    after, _ = counts(opened)
    assert after[2] == 0
    assert min(after[k] for k in (0, 1, 3, 4)) >= min(before[k] for k in (0, 1, 3, 4))
    boxes[2].click()
    assert counts(opened)[0] == before
    opened.find_element(By.ID, "none").click()
    assert counts(opened)[0] == [0] * 5
    opened.find_element(By.ID, "all").click()
    assert counts(opened)[0] == before


def test_a_gene_is_a_color(opened):
    Select(opened.find_element(By.ID, "colour")).select_by_visible_text("Gene2")
    assert sum(counts(opened)[0]) == 0
    assert opened.find_element(By.ID, "ramp").is_displayed()
    canvas = opened.find_element(By.ID, "tissue").rect
    strength = opened.execute_script(DARKNESS)
    assert canvas["width"] > 300
    assert np.argmax(strength) == 2  # the stripe in the middle, of five
    Select(opened.find_element(By.ID, "colour")).select_by_visible_text("domain")
    assert min(counts(opened)[0]) > 500
    assert not opened.find_element(By.ID, "ramp").is_displayed()


def test_a_sample_is_shown_alone(opened):
    choice = Select(opened.find_element(By.ID, "sample"))
    assert [option.text for option in choice.options] == ["all", HOSTILE, "right"]
    choice.select_by_visible_text("right")
    seen, _ = counts(opened)
    assert seen[:2] == [0, 0]
    assert seen[4] > 500


def test_the_keyboard_moves_and_zooms(opened):
    canvas = opened.find_element(By.ID, "tissue")
    whole = picture(opened)
    canvas.send_keys("+", "+")
    assert opened.find_element(By.ID, "tip").text.startswith("Domain layer 3")  # the one in the middle
    closer = picture(opened)
    assert closer != whole
    canvas.send_keys(Keys.ARROW_LEFT, Keys.ARROW_UP)
    assert picture(opened) != closer
    canvas.send_keys("0", Keys.ESCAPE)
    assert picture(opened) == whole
    canvas.send_keys(Keys.TAB)
    assert opened.switch_to.active_element.get_attribute("id") != "tissue"


def test_wheel_and_drag(opened):
    canvas = opened.find_element(By.ID, "tissue")
    whole = picture(opened)
    canvas.click()
    origin = ScrollOrigin.from_element(canvas)
    ActionChains(opened).scroll_from_origin(origin, 0, -300).perform()
    closer = picture(opened)
    assert closer != whole
    ActionChains(opened).click_and_hold(canvas).move_by_offset(80, 40).release().perform()
    assert picture(opened) != closer
    opened.find_element(By.ID, "whole").click()
    hover(opened, [2, 2])
    assert picture(opened) == whole


def test_the_scale_bar_is_as_long_as_it_says(browser, tmp_path: Path):
    adata = tissue()
    adata.uns["spatial"] = {"library": {"scalefactors": {"spot_diameter_fullres": 65.0}}}  # a unit is a micrometre
    report.write(adata, tmp_path / "scale.html")
    shown(browser, tmp_path / "scale.html")
    bar = browser.find_element(By.ID, "bar")
    told, unit = bar.text.split()
    assert unit == "µm"
    drawn = browser.execute_script(SPAN)  # of the tissue, which is 300 units wide
    assert float(told) / bar.rect["width"] == pytest.approx(300 / drawn, rel=0.08)


def test_hostile_texts_are_texts(opened):
    assert opened.execute_script("return window.hacked") is None
    assert opened.find_element(By.TAG_NAME, "h1").text == HOSTILE
    assert opened.find_element(By.CSS_SELECTOR, "#legend li span:nth-of-type(2)").text == HOSTILE
    assert not opened.find_elements(By.TAG_NAME, "img")


def test_no_errors_and_no_requests(opened):
    assert complaints(opened) == []
    asked = [entry["message"] for entry in opened.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert asked
    assert all('"url":"file:' in each or '"url":"data:' in each or '"url":"blob:' in each for each in asked)
    refused = opened.execute_async_script(
        "const done = arguments[0]; fetch('https://example.org').then(() => done('sent'), () => done('refused'))"
    )
    assert refused == "refused"


@pytest.mark.parametrize("width", [390, 768, 1600])
def test_it_fits_the_screen(browser, file, width):
    shown(browser, file, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert min(counts(browser)[0]) > 200


def test_light_and_dark(browser, file):
    paper = "return getComputedStyle(document.body).backgroundColor"
    shown(browser, file, dark=True)
    assert browser.execute_script(paper) == "rgb(20, 24, 29)"
    assert counts(browser, ["#14181d"])[0][0] > 1000
    assert min(counts(browser)[0]) > 500
    browser.find_element(By.ID, "theme").click()
    assert browser.execute_script(paper) == "rgb(255, 255, 255)"
    assert counts(browser, ["#ffffff"])[0][0] > 1000


def test_printed_it_is_open_and_light(browser, file):
    shown(browser, file, dark=True)
    folded = "return [...document.querySelectorAll('details')].filter((each) => each.open).length"
    before = browser.execute_script(folded)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(folded) == len(browser.find_elements(By.TAG_NAME, "details"))
    assert counts(browser, ["#ffffff"])[0][0] > 1000
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(folded) == before
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")


def test_a_hundred_thousand_spots(browser, tmp_path: Path):
    report.write(tissue(100_000), tmp_path / "large.html")
    shown(browser, tmp_path / "large.html")
    assert min(counts(browser)[0]) > 2000
    _, places = counts(browser, nth=300)
    assert hover(browser, places[3]).startswith("Domain layer 4")
    assert "around here" in browser.find_element(By.ID, "tip").text
    assert complaints(browser) == []
