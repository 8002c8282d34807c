"""The transforms of records and the types of their results, under the names of the original module.

`tokenmill.stages.transform` implements them. A transform is a function that takes a record and returns a record, or
None to leave the record out.
"""

from tokenmill.stages.transform.builtin import (
    binary_preference,
    dpo,
    good_answers,
    grpo,
    kto,
    nemo_gym,
    nemotron_rl,
    openai_chat,
    passthrough,
    preference,
    rename,
    select,
    sft,
    sharegpt,
    verl,
)
from tokenmill.stages.transform.types import (
    BinaryPreferenceRecord,
    Conversation,
    Message,
    NemotronRLRecord,
    OpenAIChatRecord,
    PreferenceRecord,
    RejectedRow,
    SftRecord,
    ShareGPTRecord,
    Transform,
)

__all__ = [
    "BinaryPreferenceRecord",
    "Conversation",
    "Message",
    "NemotronRLRecord",
    "OpenAIChatRecord",
    "PreferenceRecord",
    "RejectedRow",
    "SftRecord",
    "ShareGPTRecord",
    "Transform",
    "binary_preference",
    "dpo",
    "good_answers",
    "grpo",
    "kto",
    "nemo_gym",
    "nemotron_rl",
    "openai_chat",
    "passthrough",
    "preference",
    "rename",
    "select",
    "sft",
    "sharegpt",
    "verl",
]
