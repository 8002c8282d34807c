"""Phases of a run: its data changes at a step, and nothing is lost or repeated.

    plan_file      the file with the phases, as a user writes it
    plan           the entries of each phase: which ranges of which pair it draws, in which order
    ranges         the token ranges of a pair that an order has not drawn
    views          `.idx` files of such ranges, next to a link to the `.bin`
    opening        the samples of all phases, one after the other: `tokenmill.data.open(phases=...)`

Megatron-LM reads the phases with `--data-path` and a view: an `.idx` may name any ranges of a `.bin`. An epoch of a
pair is drawn by one entry after the other, in as many phases as it takes: each one draws what those before it left.
"""
