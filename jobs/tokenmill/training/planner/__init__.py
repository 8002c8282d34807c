"""What fits on how many GPUs, and what follows: `tokenmill fit`.

Modules, those that read others below them:

    layout   one model cut over GPUs: its sizes, and what Megatron-LM refuses of it
    memory   bytes that a GPU holds of a layout: weights, gradients, optimizer state, activations
    storage  checkpoints: how long a save takes, how often to save, how much room they need
    fit      the search over layouts, and the cost that orders them
    request  the command's words as what is to be planned
    plan     the numbers of a plan: the layouts that fit, batch, checkpoint and save interval
    render   a plan as text and as JSON
    values   a plan's best layout as values of the training chart
    cases    layouts of a file, judged one by one (`--check`)
"""
