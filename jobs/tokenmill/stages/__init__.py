"""The stages: for each, what is planned (`prepare`) and how one unit of it is done (its class, a `flow.stage.Stage`).

`prepare` returns the request (what was asked, in JSON) and a function that makes the plan; everything
else, from receipts to signals, belongs to `tokenmill.flow`.
"""
