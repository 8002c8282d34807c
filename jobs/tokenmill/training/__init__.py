"""From a finished dataset to a Megatron-LM run that starts right, survives and says when it has not finished.

Rooms:

    planner      what fits on how many GPUs (`tokenmill fit`)
    data         what a run reads (`tokenmill blend`, `tokenmill train --build-index`)
    checkpoints  what a run writes (`tokenmill checkpoint`)
    runtime      one start of a run (`tokenmill train`)

Modules that several rooms read:

    model      a model's architecture, and the presets of models/
    settings   the settings file of a run
    arguments  Megatron-LM's command line, made of settings
    preflight  what is checked before a start: the layout, the data, the machine, the room for checkpoints
"""

MOST = 1 << 40
"""No count is greater: what is, is a slip, and might not fit a float."""

ITERATIONS = 1000
"""Iterations of a run whose settings name none."""
SEQUENCES_A_GPU = 16
"""Sequences of a global batch for each GPU, where neither the settings nor the model's recipe give the batch."""
