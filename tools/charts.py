"""Give every stage's chart the values and the schema that all of them share, from charts/common: its one home.

    python tools/charts.py            write what is generated
    python tools/charts.py --check    exit 1, naming the files, when something is not what would be written
"""

import json
import sys
from pathlib import Path

CHARTS = Path(__file__).parent.parent / "charts"
STAGES = ("download", "extract", "concatenate", "preprocess")
MARKER = "# What follows is the same in every stage's chart: change charts/common/stage.values.yaml, then `make charts`.\n"


def values(stage: str) -> str:
    """Return a chart's values.yaml: its own part, then the shared one."""
    own = (CHARTS / f"dataset-{stage}/values.yaml").read_text().partition(MARKER)[0].rstrip()
    return f"{own}\n\n{MARKER}{(CHARTS / 'common/stage.values.yaml').read_text()}"


def schema(stage: str) -> str:
    """Return a chart's schema: its own keys, the shared ones, and those of `dataset` that say what the corpus is.

    All charts take the latter, so that one file in values/datasets serves all stages.
    """
    shared = json.loads((CHARTS / "common/stage.schema.json").read_text())
    own = json.loads((CHARTS / f"dataset-{stage}/values.schema.json").read_text())
    own["properties"] |= shared["properties"]
    own["properties"]["dataset"]["properties"] |= shared["dataset"]
    return json.dumps(own, indent=2) + "\n"


def main() -> int:
    """Write the files, or say which of them are not fresh."""
    check = "--check" in sys.argv[1:]
    stale = []
    for stage in STAGES:
        for name, text in (("values.yaml", values(stage)), ("values.schema.json", schema(stage))):
            path = CHARTS / f"dataset-{stage}" / name
            if path.read_text() != text:
                stale.append(path.relative_to(CHARTS.parent))
                if not check:
                    path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not fresh, run make charts: {', '.join(map(str, stale))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
