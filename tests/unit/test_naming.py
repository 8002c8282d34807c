"""Output names: every file of any listing has a unique name that is safe on every file system."""

import hashlib
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.engine.output_names import make_distinct, make_flat_name, make_tree_name

PART = st.text(st.characters(exclude_categories=(), exclude_characters="/"), min_size=1, max_size=60)
# Few characters, so that paths clash: by case, by composition, and by the replacement of a slash in a flat name.
CLASHING = st.text("aA_.\u00e9\u00c9e\u0301", min_size=1, max_size=4)
PATHS = st.lists(st.lists(PART | CLASHING, min_size=1, max_size=3).map("/".join), unique=True, max_size=20)


def fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@given(PATHS)
@example(["a/b__c", "a__b/c", "a/b/c"])
@example(["a.jsonl", "A.jsonl"])
@example(["\u00e9.jsonl", "e\u0301.jsonl"])
@example([".", "..", ".a", "x" * 300, "X" * 300])
def test_names_are_unique_in_any_case(paths: list[str]) -> None:
    for layout in (make_flat_name, make_tree_name):
        names = make_distinct(paths, map(layout, paths))
        assert len({fold(name) for name in names}) == len(paths)
        for name in names:
            parts = name.split("/")
            assert layout is make_tree_name or len(parts) == 1
            assert all(part and not part.startswith(".") and len(part.encode()) <= 255 for part in parts)
            assert "\0" not in name


@given(PATHS)
def test_names_do_not_depend_on_the_listings_order(paths: list[str]) -> None:
    names = dict(zip(paths, make_distinct(paths, map(make_flat_name, paths)), strict=True))
    reordered = sorted(paths, key=lambda path: hashlib.sha256(path.encode("utf-8", "surrogatepass")).digest())
    assert dict(zip(reordered, make_distinct(reordered, map(make_flat_name, reordered)), strict=True)) == names


def test_a_listing_cannot_cause_a_clash() -> None:
    paths = ["a.jsonl", "A.jsonl"]
    for _ in range(3):  # a listing may contain the names that resolve a clash of two others
        paths = list(dict.fromkeys([*paths, *make_distinct(paths, paths)]))
    names = make_distinct(paths, paths)
    assert len({fold(name) for name in names}) == len(paths)


def test_names_stay_readable_and_keep_their_suffixes() -> None:
    assert make_flat_name("train/chunk1/a.jsonl.zst") == "train__chunk1__a.jsonl.zst"
    assert make_tree_name("train/chunk 1/a.jsonl.zst") == "train/chunk%201/a.jsonl.zst"
    first, second, third = make_distinct(["x/a.jsonl.zst", "y/A.jsonl.zst", "b"], ["a.jsonl.zst", "A.jsonl.zst", "b"])
    assert first.startswith("a-") and second.startswith("A-") and third == "b"
    assert first.endswith(".jsonl.zst") and second.endswith(".jsonl.zst")


def test_a_tree_name_is_outside_the_records() -> None:
    assert not make_tree_name(".tokenmill/download/plan.json").startswith(".tokenmill")
