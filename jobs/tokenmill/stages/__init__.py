"""The stages: for each, what is planned (`prepare`) and how one unit of it is done (its class, a `flow.stage.Stage`).

`prepare` returns the request (what was asked, in JSON) and a function that makes the plan; everything
else, from receipts to signals, belongs to `tokenmill.flow`.
"""

FOLDERS = {"download": "", "extract": "extracted", "concatenate": "concatenated", "preprocess": "preprocessed"}
"""The stages, in the order data flows through them, each with the folder of its output below what it reads."""

ORDER = tuple(FOLDERS)


def before(stage: str) -> tuple[str, ...]:
    """Return the stages whose outputs a stage can read."""
    return ORDER[: ORDER.index(stage)]
