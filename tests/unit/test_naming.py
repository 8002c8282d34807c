"""Output names: whatever a listing holds, every file gets a name of its own that is safe on every file system."""

import hashlib
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.flow.output_names import distinct, flat, tree

PART = st.text(st.characters(exclude_categories=(), exclude_characters="/"), min_size=1, max_size=60)
# Few characters, so that paths clash in case and composition and by what flattening puts for a slash.
CLASHING = st.text("aA_.\u00e9\u00c9e\u0301", min_size=1, max_size=4)
PATHS = st.lists(st.lists(PART | CLASHING, min_size=1, max_size=3).map("/".join), unique=True, max_size=20)


def folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@given(PATHS)
@example(["a/b__c", "a__b/c", "a/b/c"])
@example(["a.jsonl", "A.jsonl"])
@example(["\u00e9.jsonl", "e\u0301.jsonl"])
@example([".", "..", ".a", "x" * 300, "X" * 300])
def test_every_path_has_a_name_of_its_own_whatever_the_case(paths: list[str]) -> None:
    for layout in (flat, tree):
        names = distinct(paths, map(layout, paths))
        assert len({folded(name) for name in names}) == len(paths)
        for name in names:
            parts = name.split("/")
            assert layout is tree or len(parts) == 1
            assert all(part and not part.startswith(".") and len(part.encode()) <= 255 for part in parts)
            assert "\0" not in name


@given(PATHS)
def test_a_name_does_not_depend_on_the_order_of_the_listing(paths: list[str]) -> None:
    names = dict(zip(paths, distinct(paths, map(flat, paths)), strict=True))
    again = sorted(paths, key=lambda path: hashlib.sha256(path.encode("utf-8", "surrogatepass")).digest())
    assert dict(zip(again, distinct(again, map(flat, again)), strict=True)) == names


def test_a_name_can_not_be_chosen_to_meet_a_marked_one() -> None:
    paths = ["a.jsonl", "A.jsonl"]
    for _ in range(3):  # a listing may hold the very names that the clash of two others leads to
        paths = list(dict.fromkeys([*paths, *distinct(paths, paths)]))
    names = distinct(paths, paths)
    assert len({folded(name) for name in names}) == len(paths)


def test_names_stay_readable_and_keep_their_suffixes() -> None:
    assert flat("train/chunk1/a.jsonl.zst") == "train__chunk1__a.jsonl.zst"
    assert tree("train/chunk 1/a.jsonl.zst") == "train/chunk%201/a.jsonl.zst"
    first, second, third = distinct(["x/a.jsonl.zst", "y/A.jsonl.zst", "b"], ["a.jsonl.zst", "A.jsonl.zst", "b"])
    assert first.startswith("a-") and second.startswith("A-") and third == "b"
    assert first.endswith(".jsonl.zst") and second.endswith(".jsonl.zst")


def test_a_tree_never_reaches_the_records() -> None:
    assert not tree(".tokenmill/download/plan.json").startswith(".tokenmill")
