"""Training with Megatron-LM: plan a run, check its data, write its command line, supervise it and keep its checkpoints.

Packages:

    planner      the layouts that fit a number of GPUs (`tokenmill fit`)
    data         the datasets that a run reads (`tokenmill blend`, `tokenmill train --build-index`)
    checkpoints  the checkpoints that a run writes (`tokenmill checkpoint`)
    diagnose     why a run hangs (`tokenmill train diagnose`)
    runtime      one start of a run (`tokenmill train`)

Modules that several packages use:

    model      a model's architecture, and the presets in models/
    settings   the settings file of a run
    arguments  Megatron-LM's command line, built from the settings
    frameworks the command line of a program in another framework, for comparison; framework_child is its process
    preflight  the checks before a start: layout, data, machine, and disk space for checkpoints
"""

MAX_COUNT = 1 << 40
"""Upper limit of every count: a greater number is a typing error, and a float might not hold it."""

DEFAULT_ITERATIONS = 1000
"""Iterations of a run whose settings do not specify the number."""
SEQUENCES_PER_GPU = 16
"""Sequences per GPU in a global batch, when neither the settings nor the model's recipe specifies the batch."""
