"""Training with Megatron-LM: check a run's data, write its command line, and supervise it.

Packages:

    data         the datasets that a run reads (`tokenmill blend`, `tokenmill train --build-index`)
    diagnose     why a run hangs (`tokenmill train diagnose`)
    runtime      one start of a run (`tokenmill train`)

Modules that several packages use:

    settings   the settings file of a run
    arguments  Megatron-LM's command line, built from the settings
    identity   the data that a run's checkpoints were trained on, recorded next to them
    frameworks the command line of a program in another framework, for comparison; framework_child is its process
    preflight  the checks before a start: layout, data, machine, and disk space for checkpoints
"""
