"""Conversations: from a row of messages to token ids and the mask of the trained ones.

    rows      a row in one of the usual shapes -> a Conversation or a PromptAnswer
    template  Jinja in a sandbox (`sandbox`), with limits of time and memory (`limits`)
    turns     the rule: which text is a prompt, which text is trained, and where a new sequence begins
    encode    rows -> ids, mask, lengths
    gate      checks at plan time that a template renders what will be trained
    trial     runs the gate in a subprocess

`stages.chat.stage` runs this package over files. It reads nothing from the disk except templates.
"""
