"""A fixture of the tests of HTML pages."""

from collections.abc import Iterator

import pytest

from support.browser import Page, find_chromium, open_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """Open Chromium without a page."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("Chromium is not on PATH: apt-get install chromium")
    with open_page(chromium) as page:
        yield page
