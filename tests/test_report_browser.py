"""The report in a real browser: it opens without a network, answers to mouse and keyboard, and stays fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nanguard
from browsing import CHROMEDRIVER, CHROMIUM, browser, complaints, look_at, requests
from nanguard.report.page import write_report
from reported import hostile_run, long_run, real_run, refused_run

pytest.importorskip("selenium", reason="needs selenium")
if CHROMIUM is None or CHROMEDRIVER is None:
    pytest.skip("needs chromium and chromedriver", allow_module_level=True)

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

SECONDS_FOR_100_000_STEPS = 5.0
HOSTILE = '<b>x</b><img src=x onerror=alert(1)>"onmouseover="alert(2)" </script><script>alert(3)</script>'


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for seed, until in ((0, 44), (1, 42)):
        real_run(folder / f"seed{seed}", seed=seed, until=until)
    return [folder / "seed0", folder / "seed1"]


@pytest.fixture(scope="module")
def one(runs: list[Path]) -> Path:
    return write_report(runs[:1], runs[0] / "report.html")


def until(driver: Any, script: str) -> Any:
    """Waits for a script to say something that is true, and gives it back."""
    return WebDriverWait(driver, 60).until(lambda d: d.execute_script(script))


def place_of_mark(driver: Any, card: str) -> tuple[float, float]:
    """Where on the screen the mark that opens this card is drawn, with the chart scrolled into view."""
    return driver.execute_script(
        """
        const chart = document.getElementById('chart');
        chart.scrollIntoView({behavior: 'instant', block: 'start'});
        scrollBy({top: -80, behavior: 'instant'});
        for (const trace of chart._fullData) {
          const place = (trace.customdata ?? []).indexOf(arguments[0]);
          if (place < 0) continue;
          const {xaxis, yaxis} = chart._fullLayout;
          const box = chart.getBoundingClientRect();
          return [box.x + xaxis._offset + xaxis.d2p(trace.x[place]), box.y + yaxis._offset + yaxis.d2p(trace.y[place])];
        }
        """,
        card,
    )


def press(driver: Any, selector: str) -> None:
    """A click on a button, brought to the middle of the window first: the header lies over what is at the top."""
    button = driver.find_element(By.CSS_SELECTOR, selector)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()


def hover(driver: Any, x: float, y: float) -> None:
    """Goes there like a hand: near it, then on it."""
    actions = ActionChains(driver)
    for away in (6, 0):
        actions.w3c_actions.pointer_action.move_to_location(round(x) - away, round(y))
        actions.w3c_actions.pointer_action.pause(0.2)
    actions.perform()


def click_at(driver: Any, x: float, y: float) -> None:
    hover(driver, x, y)
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.click()
    actions.perform()


def test_it_opens_in_peace_and_asks_nobody(driver: Any, one: Path) -> None:
    look_at(driver, one)
    driver.get_log("browser"), driver.get_log("performance")
    driver.refresh()
    assert until(driver, "return document.querySelectorAll('#chart .scatterlayer .trace').length") >= 6
    for opener in ("#open-all", "#close-all"):
        press(driver, opener)
    for move in ("in", "left", "right", "out", "reset"):
        press(driver, f"[data-move={move}]")
    assert complaints(driver) == []
    assert requests(driver) == [one.resolve().as_uri()]


def test_a_mark_opens_its_card(driver: Any, one: Path) -> None:
    look_at(driver, one)
    card = "run0-incident5"
    until(driver, "return document.querySelector('#chart .points path') !== null")
    assert not driver.execute_script(f"return document.getElementById('{card}').open")
    click_at(driver, *place_of_mark(driver, card))
    assert until(driver, f"return document.getElementById('{card}').open")
    in_view = f"const b = document.getElementById('{card}').getBoundingClientRect(); return b.top >= 0 && b.top < 300"
    assert until(driver, in_view)
    assert driver.execute_script("return document.activeElement.textContent").startswith("step 60")
    assert driver.execute_script("return location.hash") == f"#{card}"
    assert until(driver, f"return document.querySelector('#{card} .trail .main-svg') !== null"), "with its chart"
    # A repeat lies in two folds; both open.
    click_at(driver, *place_of_mark(driver, "run0-incident4"))
    assert until(driver, "return document.getElementById('run0-incident4').checkVisibility()")
    assert "attention in fp32 from now on" in driver.find_element(By.ID, "run0-incident4").text


def test_a_drag_zooms_and_shows_every_step(driver: Any, one: Path) -> None:
    look_at(driver, one)
    until(driver, "return document.querySelector('#chart .nsewdrag') !== null")
    x, y = place_of_mark(driver, "run0-incident5")
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.move_to_location(round(x) - 60, round(y) + 200)
    actions.w3c_actions.pointer_action.pointer_down()
    actions.w3c_actions.pointer_action.move_to_location(round(x) + 60, round(y) + 205)
    actions.w3c_actions.pointer_action.pointer_up()
    actions.perform()
    span = "const [a, b] = document.getElementById('chart').layout.xaxis.range; return b - a"
    assert until(driver, f"{span} < 30")
    assert driver.execute_script(span) > 2
    press(driver, "[data-move=reset]")
    assert driver.execute_script(span) >= 89


def test_what_is_under_the_pointer_is_told_to_the_bit(driver: Any, one: Path) -> None:
    look_at(driver, one)
    until(driver, "return document.querySelector('#chart .nsewdrag') !== null")
    x, y = place_of_mark(driver, "run0-incident5")
    hover(driver, x + 1, y + 150)
    rows = until(driver, "return document.querySelector('.readout')?.innerText").splitlines()
    assert rows[0] == "step 60"
    assert any("the loss is NaN: step skipped" in row for row in rows)
    assert rows[rows.index("Loss") + 1] == "NaN"
    assert rows[rows.index("Learning rate · AdamW group 1") + 1] == "0.003"


def test_marks_that_overlap_are_one_with_their_number_and_the_pointer_tells_each(driver: Any, one: Path) -> None:
    look_at(driver, one, width=700)
    until(driver, "return document.querySelector('#chart .nsewdrag') !== null")
    numbers = "return document.getElementById('chart').data.flatMap((t) => t.text ?? []).filter(Boolean)"
    assert driver.execute_script(numbers) == ["×4"], "steps 40 to 43"
    x, y = place_of_mark(driver, "run0-incident1")
    hover(driver, x + 5, y + 3)
    rows = until(driver, "return document.querySelector('.readout')?.innerText").splitlines()
    assert rows[0] == "steps 40 to 43"
    assert rows[1].startswith("step 40: the loss is NaN: step skipped")
    assert "overflow of fp16 in attention" in rows[1]
    assert [row.partition(":")[0] for row in rows[1:5]] == [f"step {step}" for step in range(40, 44)]
    # A mark wins over the nearest point of a curve.
    x, y = place_of_mark(driver, "run0-incident5")
    hover(driver, x + 8, y)
    rows = until(driver, "return document.querySelector('.readout')?.innerText").splitlines()
    assert rows[0] == "step 60"
    assert "non-finite data" in rows[1]


def test_the_keyboard_is_enough(driver: Any, one: Path) -> None:
    look_at(driver, one)
    until(driver, "return document.querySelector('#chart .main-svg') !== null")
    reached: list[str] = []
    for _ in range(80):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        focus = driver.switch_to.active_element
        reached.append(f"{focus.tag_name} {focus.text}"[:60])
        if focus.tag_name == "summary" and "step 60" in focus.text:
            break
    assert reached[0].startswith("a Skip to the content")
    assert any(each.startswith("button") and "step skipped" in each for each in reached), "the legend can be reached"
    assert "step 60" in reached[-1]
    outline = driver.execute_script(
        "const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth"
    )
    assert outline == "solid2px"
    card = "return document.getElementById('run0-incident5').open"
    assert not driver.execute_script(card)
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    assert driver.execute_script(card)
    ActionChains(driver).send_keys(Keys.SPACE).perform()
    assert not driver.execute_script(card)


COLOURS = """
const chart = document.getElementById('chart');
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
        chart.layout.paper_bgcolor, chart.data.at(-1).line.color,
        document.querySelector('.card[open] .trail').data[0].marker.color[0]];
"""


def test_the_theme_changes_page_and_charts_and_is_remembered(driver: Any, one: Path) -> None:
    look_at(driver, one, theme="light")
    until(driver, "return document.querySelector('.card[open] .trail .main-svg') !== null")
    light = driver.execute_script(COLOURS)
    assert driver.find_element(By.ID, "theme").text == "Dark", "the theme that it switches to"
    driver.find_element(By.ID, "theme").click()
    dark = driver.execute_script(COLOURS)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    driver.refresh()
    until(driver, "return document.querySelector('.card[open] .trail .main-svg') !== null")
    assert driver.execute_script(COLOURS) == dark
    driver.execute_script("localStorage.clear()")
    look_at(driver, one, theme="dark")
    until(driver, "return document.querySelector('.card[open] .trail .main-svg') !== null")
    assert driver.execute_script(COLOURS) == dark, "what the system prefers"
    assert driver.find_element(By.ID, "theme").text == "Light"
    assert driver.find_element(By.ID, "theme").accessible_name == "Switch to the light theme"


CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const numbers = (css, under) => {
  canvas.clearRect(0, 0, 1, 1);
  for (const colour of [under, css]) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (rgb) => {
  const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  const own = getComputedStyle(node).backgroundColor;
  if (!node.parentElement) return own;
  const [r, g, b] = numbers(own, ground(node.parentElement));
  return `rgb(${r}, ${g}, ${b})`;
};
const poor = [];
for (const node of document.querySelectorAll('body *')) {
  const has_text = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!has_text || node.closest('svg, script, noscript') || !node.checkVisibility()) continue;
  const under = ground(node);
  const [a, b] = [light(numbers(getComputedStyle(node).color, under)), light(numbers(under, under))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push([node.className || node.tagName, node.textContent.slice(0, 30), ratio]);
}
return poor;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_can_be_read(driver: Any, one: Path, theme: str) -> None:
    look_at(driver, one, theme=theme)
    press(driver, "#open-all")
    assert driver.execute_script(CONTRASTS) == []


OUTSIDE = """
return [...document.querySelectorAll('body *')]
  .filter((node) => !node.closest('.scrolled, pre, svg, nav, #chart > *, .trail > *') && node.checkVisibility())
  .filter((node) => node.getBoundingClientRect().right > 361)
  .map((node) => node.outerHTML.slice(0, 90));
"""


def test_a_phone_scrolls_one_way_only(driver: Any, runs: list[Path], one: Path, tmp_path: Path) -> None:
    hostile = hostile_run(tmp_path / "hostile", HOSTILE)
    everything = write_report([*runs, hostile], tmp_path / "all.html")
    for page in (one, everything):
        look_at(driver, page, width=360, height=740)
        until(driver, "return document.querySelector('#chart .main-svg') !== null")
        driver.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        until(driver, "return document.querySelectorAll('.trail .main-svg').length > 1")
        assert driver.execute_script(OUTSIDE) == []
        widest = "return [document.documentElement.scrollWidth, document.body.scrollWidth]"
        assert driver.execute_script(widest) == [360, 360]


def test_hostile_names_stay_text(driver: Any, tmp_path: Path) -> None:
    page = write_report([hostile_run(tmp_path / "run", HOSTILE)], tmp_path / "report.html")
    look_at(driver, page)
    driver.get_log("browser")
    until(driver, "return document.querySelector('#chart .main-svg') !== null")
    driver.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    until(driver, "return document.querySelector('.trail .main-svg') !== null")
    # Also under the pointer: in the timeline, and where plotly itself writes the label.
    hover(driver, *place_of_mark(driver, "run0-event0"))
    assert HOSTILE[:80] in until(driver, "return document.querySelector('.readout')?.textContent")
    bar = driver.execute_script(
        """
        const bar = document.querySelector('.trail .bars path');
        bar.scrollIntoView({block: 'center', behavior: 'instant'});
        const box = bar.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
        """
    )
    hover(driver, *bar)
    label = until(driver, "return document.querySelector('.trail .hoverlayer text')?.textContent")
    assert "<b>x</b><img src=x onerror=alert(1)>" in label, "plotly itself knows a part of HTML"
    assert driver.find_elements(By.CSS_SELECTOR, "img, [onmouseover], [onerror], svg script") == []
    assert driver.execute_script("return document.scripts.length") == 4
    labels = driver.execute_script(
        "return [...document.querySelectorAll('.trail .ytick text')].map((t) => t.textContent)"
    )
    assert labels
    assert all(HOSTILE.endswith(label.strip("…")) for label in labels), labels
    assert "<img src=x onerror=alert(1)>" in driver.find_element(By.CSS_SELECTOR, "#run0-incident1 h3").text
    assert [entry for entry in complaints(driver) if "alert" in entry] == []
    assert complaints(driver) == []


def test_several_runs_lie_over_each_other(driver: Any, runs: list[Path], tmp_path: Path) -> None:
    look_at(driver, write_report(runs, tmp_path / "both.html"))
    until(driver, "return document.querySelector('#chart .main-svg') !== null")
    data = "return document.getElementById('chart').data"
    losses = f"{data}.filter((t) => t.yaxis === 'y2' && t.meta === 'line').map((t) => [t.name, t.line.color])"
    (first, colour), (second, other) = driver.execute_script(losses)
    assert (first, second) == ("seed0", "seed1")
    assert colour != other
    marks = f"{data}.filter((t) => t.customdata).map((t) => t.marker.color)"
    assert set(driver.execute_script(marks)) == {colour, other}
    button = driver.find_element(By.CSS_SELECTOR, "button[data-run='0']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert driver.execute_script(losses) == [["seed1", other]]
    assert set(driver.execute_script(marks)) == {other}
    kind = driver.find_element(By.CSS_SELECTOR, "button[data-kind='skip']")
    kind.click()
    assert (
        driver.execute_script("return document.getElementById('chart').data.some((t) => t.name === 'step skipped')")
        is False
    )
    search = driver.find_element(By.ID, "filter")
    search.send_keys("non-finite data")
    shown = [card.get_attribute("id") for card in driver.find_elements(By.CSS_SELECTOR, ".card") if card.is_displayed()]
    assert shown == ["run0-incident5", "run1-incident3"]


def test_a_hundred_thousand_steps_are_there_at_once_and_in_full(driver: Any, tmp_path: Path) -> None:
    page = write_report([long_run(tmp_path / "long")], tmp_path / "long.html")
    look_at(driver, page)  # the first time the disk is read; the second time is counted
    start = time.perf_counter()
    driver.get(page.resolve().as_uri() + "?again")
    until(driver, "return document.querySelectorAll('#chart .scatterlayer .trace').length >= 5")
    driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")
    seconds = time.perf_counter() - start
    print(f"\n100,000 steps: {seconds:.2f} s")
    assert seconds < SECONDS_FOR_100_000_STEPS
    drawn = "const drawn = document.getElementById('chart').data.filter((t) => t.yaxis === 'y2')"
    assert driver.execute_script(f"{drawn}; return drawn.map((t) => t.meta)") == ["band", "line"]
    assert driver.execute_script(f"{drawn}; return drawn[1].x.length") < 1500, "no more than there are pixels"
    highest = driver.execute_script(f"{drawn}; return Math.max(...drawn[0].y)")
    assert highest == 7.25, "one step of a hundred thousand is seen"
    for _ in range(14):
        press(driver, "[data-move=in]")
    x, y = driver.execute_script(f"{drawn}; return [drawn[0].x, drawn[0].y]")
    told = {line.step: line.loss for line in nanguard.read_run(tmp_path / "long").steps}
    assert x == list(range(int(x[0]), int(x[-1]) + 1)), "every step, once close enough"
    assert 3 < len(x) < 60
    assert y == [told[int(step)] for step in x], "to the bit"


def test_without_scripts_all_but_the_charts_is_there(driver: Any, one: Path) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look_at(driver, one)
        assert "overflow of fp16" in driver.find_element(By.CSS_SELECTOR, ".lede").text
        assert "Charts need JavaScript" in driver.find_element(By.CSS_SELECTOR, "#timeline").text
        assert driver.find_element(By.ID, "run0-incident1").text.count("non-finite") >= 2
        assert not driver.find_element(By.ID, "controls").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_it_prints_in_light_on_a_page_with_all_cards(driver: Any, one: Path) -> None:
    look_at(driver, one, theme="dark")
    until(driver, "return document.querySelector('#chart .main-svg') !== null")
    driver.execute_script(
        """
        addEventListener('beforeprint', () => {
          const {width, paper_bgcolor} = document.getElementById('chart').layout;
          const open = [...document.querySelectorAll('.card')].every((card) => card.open);
          window.printed = [width, paper_bgcolor, open, document.querySelectorAll('.trail .main-svg').length > 1];
        });
        """
    )
    told = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(told["data"]) > 20_000
    width, ground, *rest = driver.execute_script("return window.printed")
    assert 600 < width <= 680
    assert ground == "rgb(255, 255, 255)"
    assert rest == [True, True]
    after = (
        "return [document.getElementById('run0-incident5').open, document.getElementById('chart').layout.paper_bgcolor]"
    )
    assert driver.execute_script(after) == [False, "rgb(24, 28, 34)"], "as before"


def test_lines_of_incidents_go_on_to_the_last_of_many(driver: Any, tmp_path: Path) -> None:
    page = write_report([refused_run(tmp_path)], tmp_path / "report.html")
    look_at(driver, page)
    lines = until(driver, "return document.getElementById('chart')._fullLayout?.shapes.map((line) => line.x0)")
    assert lines[0] == 2
    assert lines[-1] >= 398
    assert max(after - before for before, after in pairwise(lines)) <= 4
    assert len(lines) <= 251


@pytest.mark.parametrize("number", [1, 2])
def test_on_a_narrow_screen_nothing_in_the_chart_lies_on_anything_else(
    number: int, driver: Any, runs: list[Path], tmp_path: Path
) -> None:
    page = write_report([refused_run(tmp_path), *runs][:number], tmp_path / "report.html")
    look_at(driver, page, width=500)
    until(driver, "return document.querySelectorAll('#chart .annotation-text').length")
    boxes = driver.execute_script(
        """
        const ticks = '.ytick, .y2tick, .y3tick, .y4tick, .y5tick';
        const texts = document.querySelectorAll(`#chart .annotation-text, #chart :is(${ticks}) text`);
        const edge = document.getElementById('chart').getBoundingClientRect();
        return [...texts].filter((text) => text.textContent).map((text) => {
          const box = text.getBoundingClientRect();
          return [text.textContent, box.left - edge.left, box.right - edge.left, box.top, box.bottom, edge.width];
        });
        """
    )
    words = [name for name, *_ in boxes]
    assert {"Loss", "Gradient norm", "Learning rate", "precision raised", "step skipped"} <= set(words)
    assert len(words) > 12  # the ticks are among them
    for place, (name, left, right, top, bottom, width) in enumerate(boxes):
        assert left >= 0, name
        assert right <= width, name
        for other, *(left_2, right_2, top_2, bottom_2), _ in boxes[place + 1 :]:
            assert right <= left_2 or right_2 <= left or bottom <= top_2 + 1 or bottom_2 <= top + 1, (name, other)
