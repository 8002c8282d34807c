"""The planner behind `tokenmill fit`: which layouts of a model fit a number of GPUs, and how to save checkpoints.

Modules; each module uses only modules above it:

    layout   one model on a number of GPUs: its sizes, and the rules of Megatron-LM that it violates
    memory   bytes of a layout on a GPU: weights, gradients, optimizer state, activations
    storage  checkpoints: duration of a save, save interval, space on the storage
    fit      the search over layouts, and the cost estimate that ranks them
    request  the options of the command, as the input of a plan
    plan     the numbers of a plan: the layouts that fit, batch, checkpoint and save interval
    render   a plan as text and as JSON
    values   a plan's best layout as values of the training chart
    cases    a file of layouts, each checked separately (`--check`)
"""
