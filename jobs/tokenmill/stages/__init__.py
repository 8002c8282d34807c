"""The stages: for each, what a unit of work is (`prepare`) and how one is done (`do`).

`prepare` returns the request (what was asked, in JSON) and a function that makes the plan; everything
else, from receipts to signals, belongs to `tokenmill.flow`.
"""
