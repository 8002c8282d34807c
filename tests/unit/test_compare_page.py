"""The HTML file and the command of a comparison: safe, self-contained and legible, in a real browser too."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from support.browser import Page
from support.run_files import identity, megatron_arguments, megatron_line, write_jsonl_run
from tokenmill.cli.commands import Command
from tokenmill.cli.compare import compare
from tokenmill.errors import RequestError
from tokenmill.reports.compare.page import write_page
from tokenmill.reports.compare.plots import MAX_POINTS
from tokenmill.reports.compare.report import compare_runs
from tokenmill.reports.compare.run import parse_inputs

EVIL = "<script>alert(1)<!--\"'&"


def run_command(*arguments: object) -> str:
    app = typer.Typer()
    app.command(cls=Command)(compare)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def make_page(directory: Path) -> Path:
    """Write a page about runs that are comparable, different, unknown and synthetic, with hostile names."""
    runs = [write_jsonl_run(directory / "base", range(1, 2001), record=identity())]
    runs.append(write_jsonl_run(directory / "small-lr", range(1, 1501), record=identity(), seed=1))
    runs.append(write_jsonl_run(directory / "seed", range(1, 301), record=identity(seed=7), seed=2))
    log = directory / "a-run-of-megatron-with-a-very-long-name"
    log.mkdir()
    lines = [megatron_line(step, clock=step) for step in range(10, 1001, 10)]
    (log / "x.log").write_text("\n".join([megatron_arguments(note="</script><script>alert(2)</script>"), *lines]))
    evil = write_jsonl_run(directory / "evil", range(1, 501), record=identity(kind="synthetic"))
    (evil / "args.json").write_text(json.dumps({"note": EVIL, "lr": 1}))
    path = directory / "compare.html"
    report, compared = compare_runs(parse_inputs([*map(str, runs), str(log), f"{EVIL.replace('/', '')}={evil}"]))
    write_page(path, report, compared)
    return path


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data


def test_page_is_safe_and_self_contained(tmp_path: Path) -> None:
    text = make_page(tmp_path).read_text()
    page = Elements(text)
    assert len(page.scripts) == 2, "no text of a run makes an element"
    attributes = [(name, value) for _, values in page.elements for name, value in values.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name == "style"]
    assert [value for name, value in attributes if name in ("src", "href", "action")] == ["data:,"]
    assert not re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    policy = next(str(values["content"]) for tag, values in page.elements if "http-equiv" in values and tag == "meta")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "SYNTHETIC" in text[: text.index("</title>")]
    assert 'class="synthetic">SYNTHETIC' in text
    data = json.loads(page.scripts[0])
    assert data["runs"][4]["name"] == f"{EVIL} [SYNTHETIC]"
    for run in data["runs"]:
        for kind in ("loss", "rate", "wait"):
            for line in (run[kind]["raw"], run[kind]["smooth"]) if run[kind] else ():
                assert len(line["values"]) == len(line["steps"]) <= MAX_POINTS + 2
    assert len(text) < 200_000


def test_spikes_stay_visible(tmp_path: Path) -> None:
    write_jsonl_run(tmp_path / "a", range(1, 5001), seconds=lambda step: 9.0 if step == 3333 else 0.5)
    path = tmp_path / "compare.html"
    run_command(tmp_path / "a", "--html", path)
    line = json.loads(Elements(path.read_text()).scripts[0])["runs"][0]["rate"]["raw"]
    assert 3333 in line["steps"]


def test_command(tmp_path: Path) -> None:
    runs = [write_jsonl_run(tmp_path / name, record=identity(seed=seed)) for name, seed in (("a", 1), ("b", 2))]
    output = run_command(*runs)
    assert output.startswith("NOT comparable with a: b\n  NOT comparable: from a to b: the seed was 1, and is 2 now")
    assert re.search(r"loss, last \(smoothed\) +3\.\d{4} +3\.\d{4}\n", output)
    result = json.loads(run_command(*runs, "--json"))
    assert result["event"] == "result"
    assert result["verdicts"][0]["state"] == "not comparable"
    assert [run["tokens"] for run in result["runs"]] == [204800, 204800]
    assert "tokens" not in json.loads(run_command(runs[0], "--json"))["headline"]


def test_only_reports_are_replaced(tmp_path: Path) -> None:
    run = write_jsonl_run(tmp_path / "a")
    target = tmp_path / "compare.html"
    for _ in range(2):
        run_command(run, "--html", target)
    target.write_text("my own page")
    with pytest.raises(RequestError, match="is not a report"):
        run_command(run, "--html", target)
    assert target.read_text() == "my own page"
    with pytest.raises(RequestError, match="does not exist; create it"):
        run_command(run, "--html", tmp_path / "missing/compare.html")


# -- in a browser


@pytest.mark.slow
def test_page_in_a_browser(browser: Page, tmp_path: Path) -> None:
    path = make_page(tmp_path)
    browser.resize(1280, 900)
    browser.open(path.as_uri())
    lines = "document.querySelectorAll('svg[data-kind=loss] path').length"
    shown = "getComputedStyle(document.querySelector('svg[data-kind=loss] g[data-run=\"1\"]')).display"
    assert (browser.evaluate(lines), browser.evaluate(shown)) == (10, "inline")
    light = browser.measure_legibility()
    assert light["lowest"][0] >= 4.5, light
    assert light["smallest"] >= 11

    browser.hover("svg[data-kind=loss]", 0.1)
    tip = browser.evaluate("document.querySelector('figure .tip').innerText")
    assert "small-lr" in tip and EVIL in tip and re.search(r"\d\.\d{4}", tip)
    values = browser.evaluate("document.querySelector('.values tbody').rows[1].innerText")
    assert re.search(r"small-lr\s+\d\.\d{4}\s+\d+\s+1\.00%", values)

    browser.click('button[data-run="1"]')
    assert browser.evaluate(shown) == "none"
    assert browser.evaluate("document.querySelector('button[data-run=\"1\"]').getAttribute('aria-pressed')") == "false"
    browser.evaluate("document.querySelector('button[data-run=\"1\"]').focus()")
    browser.press("Space")
    assert browser.evaluate(shown) == "inline", "the keyboard presses a button, too"

    browser.click("#smooth")
    assert browser.evaluate(lines) == 5
    browser.click("#logX")
    browser.click("#logY")
    assert browser.evaluate("document.querySelector('svg[data-kind=loss]').textContent").endswith("(logarithmic)")
    browser.click("#zoom")
    assert browser.evaluate(lines) == 5
    browser.click("#axis")
    assert "steps" in browser.evaluate("document.querySelector('svg[data-kind=loss]').textContent")
    browser.evaluate("document.querySelector('svg[data-kind=loss]').focus()")
    browser.press("ArrowRight")
    assert "steps" in browser.evaluate("document.querySelector('figure .tip').innerText")

    browser.resize(1280, 900, dark=True)
    dark = browser.measure_legibility()
    assert dark["background"] != light["background"]
    assert dark["lowest"][0] >= 4.5, dark
    browser.click("#theme")
    assert browser.measure_legibility()["background"] == light["background"]

    browser.resize(375, 800)
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 375
    assert browser.measure_legibility()["smallest"] >= 11
    assert browser.evaluate("document.querySelector('svg[data-kind=loss]').clientWidth") <= 375

    assert browser.list_requests() == [path.as_uri()]
    assert browser.list_complaints() == []


@pytest.mark.slow
def test_the_first_view_leaves_out_a_spike(browser: Page, tmp_path: Path) -> None:
    path, page = tmp_path / "run.csv", tmp_path / "compare.html"
    losses = {step: 95.0 if step == 1500 else 2 + 2 / step for step in range(1, 2000)}
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in losses.items()))
    write_page(page, *compare_runs(parse_inputs([str(path)])))
    browser.open(page.as_uri())
    ticks = (
        "[...document.querySelectorAll('svg[data-kind=loss] text[text-anchor=end]')].map((text) => text.textContent)"
    )
    assert browser.evaluate(ticks) == ["2", "2.2", "2.4", "2.6", "2.8", "3", "3.2"]
    browser.click("#whole")
    assert browser.evaluate(ticks) == ["0", "20", "40", "60", "80", "100"]


@pytest.mark.slow
def test_no_negative_axis_for_a_positive_loss(browser: Page, tmp_path: Path) -> None:
    for name, shift in (("positive", 0.001), ("negative", -1.0)):
        path = tmp_path / f"{name}.csv"
        path.write_text("step,loss\n" + "".join(f"{step},{shift + 2 / step}\n" for step in range(1, 2000)))
        page = tmp_path / f"{name}.html"
        write_page(page, *compare_runs(parse_inputs([str(path)])))
        browser.open(page.as_uri())
        labels = browser.evaluate(
            "[...document.querySelectorAll('svg[data-kind=loss] text')].map((label) => label.textContent).join('|')"
        )
        assert any(label.startswith(("-", "\u2212")) for label in labels.split("|")) == (name == "negative"), labels
