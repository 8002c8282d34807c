"""Generate what charts share or repeat: `make charts`.

Values and schema of a stage's chart: its own part, then what charts/common holds for all of them. READMEs: from the
comments in values.yaml, by helm-docs.

    python tools/charts.py            write it
    python tools/charts.py --check    exit 1, naming the files, when something is not what would be written
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHARTS = ROOT / "charts"
STAGES = ("download", "extract", "concatenate", "preprocess")
MARKER = "# The rest is the same in every stage's chart: change charts/common/stage.values.yaml, then `make charts`.\n"


def values(chart: Path) -> str:
    """Return a stage chart's values.yaml."""
    own = (chart / "values.yaml").read_text().partition(MARKER)[0].rstrip()
    return f"{own}\n\n{MARKER}{(CHARTS / 'common/stage.values.yaml').read_text()}"


def schema(chart: Path) -> str:
    """Return a stage chart's schema; all of them take the keys of `dataset` that say what the corpus is.

    So one file in values/datasets serves all stages.
    """
    shared = json.loads((CHARTS / "common/stage.schema.json").read_text())
    own = json.loads((chart / "values.schema.json").read_text())
    own["properties"] |= shared["properties"]
    own["required"] = [*shared["required"], "dataset"]
    own["properties"]["dataset"]["properties"] |= shared["dataset"]
    return json.dumps(own, indent=2) + "\n"


def readme(chart: Path) -> str:
    """Return a chart's README.md, made of its README.md.gotmpl and the comments in its values.yaml."""
    command = [ROOT / ".cache/bin/helm-docs", "--dry-run", "--log-level=warning", "--sort-values-order=file"]
    done = subprocess.run([*command, f"--chart-search-root={chart}"], capture_output=True, text=True, check=True)
    return done.stdout.strip() + "\n"


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each generated file with what it should hold; a README is made after its values were written."""
    for stage in STAGES:
        chart = CHARTS / f"dataset-{stage}"
        yield chart / "values.yaml", values(chart)
        yield chart / "values.schema.json", schema(chart)
    for template in sorted(CHARTS.glob("*/README.md.gotmpl")):
        yield template.parent / "README.md", readme(template.parent)


def main() -> int:
    """Write the files, or say which of them are not fresh."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not fresh, run make charts: {', '.join(stale)}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
