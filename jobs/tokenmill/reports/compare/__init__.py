"""Comparison of training runs, from the files that they wrote: `tokenmill compare` and `compare_runs`.

Modules, in the order of the flow of data:

    columns       rows of numbers with documented names, and the names that other programs use for them
    search        the files of a run that are read
    megatron_log  iterations and arguments in Megatron-LM's log
    event_file    TensorBoard's event files, read without TensorBoard
    metric_file   JSONL, CSV and trainer_state.json
    settings      settings of a run, as text, without secrets
    run_data      the data that a run was trained on
    series        the steps of a run that its model descends from: attempts, tokens, seconds
    run           one run, read from a directory or a file
    verdict       whether two runs are comparable
    report        the numbers of all runs
    text          the report as text
    page          the report as one HTML file
"""
