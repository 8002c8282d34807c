"""One attempt of a training run on one node: rendezvous, lease, supervision of the trainer, verdict.

Modules, in the order of their imports:

    node         rank of this node, arguments and environment of the launcher
    log_monitor  progress and cause of a failure, read from Megatron-LM's output
    output       the log: the lines of the launcher and those of tokenmill
    processes    processes of the launcher: list, signal, kill
    attempts     records next to the checkpoints: attempts, verdict, progress, arrivals, failures
    flight_recorder  torch's flight recorder in the ranks: environment, requests, dumps
    hang_record  stacks and dumps of a run that hangs, saved next to the checkpoints
    supervisor   runs the launcher, and ends it when it hangs
    peers        progress that the nodes share
    rendezvous   which nodes have started, and which have restarted
    lease        one run at a time writes to the checkpoints
    prepare      the checked settings and the command of this node
    announce     which node announces the end or a hang
    verdict      exit code and reason of an attempt
    run          `tokenmill train`: all steps in order
"""
