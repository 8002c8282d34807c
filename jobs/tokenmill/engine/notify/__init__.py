"""Announcements of the end of a stage or of a training run: a webhook, and an Event of Kubernetes.

    message      what is announced, and its form for each receiver
    webhook      sends a message by HTTP POST
    event        records a message as an Event of Kubernetes
    announcer    sends announcements, in a limited time, and only warns about failures

`engine.announce` decides which worker of a stage announces, and `train.runtime.announce` which node of a run.
"""
