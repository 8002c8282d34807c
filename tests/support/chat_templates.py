"""Chat templates that imitate the habits of public families, for tests: each has another kind of history or prompt."""

MARKS = (
    "<|start|>", "<|end|>", "<|stop|>", "<|begin|>", "<|user|>", "<|bot|>", "<|calls|>", "<|call|>", "<|done|>",
    "<|out|>", "<|part|>", "<|text|>", "<|return|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>",
)  # fmt: skip
"""The special tokens of these templates."""

BEGIN, STOP = "<|begin|>", "<|stop|>"
"""The tokens bos and eos."""

INSTRUCTION = """\
{{ bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in rest -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('the roles must alternate') }}
    {%- endif -%}
    {%- if m.role == 'user' -%}
        {{ '[INST] ' + (messages[0].content + '\\n\\n' if loop.first and rest | length < messages | length else '') }}
        {{- m.content | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + m.content | trim + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
"""Answers without a header: there is no generation prompt, and other roles raise."""

ENDING = """\
{%- for m in messages -%}
{{ '<|' + ('bot' if m.role == 'assistant' else 'user') + '|>' + m.content + '<|end|>\\n' }}
{%- endfor -%}
{{ '<|bot|>' if add_generation_prompt else eos_token }}"""
"""The eos token at the end of each text without a generation prompt."""

ARGUMENTS = """\
{%- set ns = namespace(system='', asked=false) -%}
{%- for m in messages if m.role == 'system' -%}{% set ns.system = ns.system + m.content %}{%- endfor -%}
{{ bos_token + ns.system }}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}
        {% set ns.asked = true %}{{ '<|user|>' + m.content }}
    {%- elif m.role == 'tool' -%}
        {% set ns.asked = false %}{{ '<|out|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'assistant' -%}
        {%- if ns.asked -%}{{ '<|bot|></think>' }}{%- endif -%}
        {%- set ns.asked = false -%}
        {{ m.content.split('</think>')[-1] }}
        {%- for call in m.tool_calls or [] -%}
            {{ '<|call|>' + call.function.name + '<|part|>' + call.function.arguments + '<|done|>' }}
        {%- endfor -%}
        {{ eos_token }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked -%}
    {{ '<|bot|>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif -%}
"""
"""Arguments as text, the variable `thinking`, a header only behind the user, and reasoning that is removed."""

CHANNELS = """\
{%- macro head() -%}Date: {{ strftime_now('%Y-%m-%d') if strftime_now is defined else 'unknown' }}{%- endmacro -%}
<|start|>system<|text|>{{ head() }}<|end|>
{%- for m in messages -%}
    {%- if m.role == 'assistant' and m.tool_calls -%}
        {%- if m.thinking -%}{{ '<|start|>assistant<|part|>analysis<|text|>' + m.thinking + '<|end|>' }}{%- endif -%}
        {%- for call in m.tool_calls -%}
            {{ '<|start|>assistant to=' + call.function.name + '<|text|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- endfor -%}
    {%- elif m.role == 'assistant' -%}
        {%- if loop.last and m.thinking -%}
            {{ '<|start|>assistant<|part|>analysis<|text|>' + m.thinking + '<|end|>' }}
        {%- endif -%}
        {{ '<|start|>assistant<|part|>final<|text|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- else -%}
        {{ '<|start|>' + m.role + '<|text|>' + (m.content | tojson if m.role == 'tool' else m.content) + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""Channels: another end of the last answer, reasoning in a part of its own, which the history lacks."""

THINKING = """\
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{% set ns.last = loop.index0 %}{%- endfor -%}
{%- for m in messages -%}
    {%- set content = text(m.content) | trim -%}
    {%- if m.role == 'assistant' -%}
        {%- set reasoning = m.reasoning_content or '' -%}
        {%- if '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip() -%}
            {%- set content = content.split('</think>')[-1].strip() -%}
        {%- endif -%}
        {{ '<|im_start|>assistant\\n' }}
        {%- if loop.last or reasoning and loop.nextitem.role != 'user' -%}
            {{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif -%}
        {{ content }}
        {%- for call in m.tool_calls or [] -%}
            {{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' -%}
        {{ '<|im_start|>user\\n<tool_response>' + content + '</tool_response><|im_end|>\\n' }}
    {%- else -%}
        {{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif -%}
"""
"""Reasoning only in the last answer, a variable to turn it off, a default system message, and a macro."""

JOINED = """\
{%- set ns = namespace(role='') -%}
{%- for m in messages -%}
    {%- if m.role == ns.role -%}{{ '\\n\\n' + m.content }}
    {%- else -%}{{ ('<|im_end|>\\n' if ns.role else '') + '<|im_start|>' + m.role + '\\n' + m.content }}{%- endif -%}
    {%- set ns.role = m.role -%}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Successive messages of one role in one turn."""

FORCED = """\
{%- for m in messages -%}
    {%- set content = m.content.split('</think>')[-1] if not loop.last else m.content -%}
    {{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>' }}{%- endif -%}
"""
"""A generation prompt that begins the reasoning; an answer without reasoning has no prompt."""

PLAIN = """\
{%- for m in messages -%}
    {%- if m.role == 'system' -%}{{ m.content + ' ' }}
    {%- elif m.role == 'user' -%}{{ 'USER: ' + m.content + ' ' }}
    {%- else -%}{{ 'ASSISTANT: ' + m.content + eos_token }}{%- endif -%}
{%- endfor -%}
{{ 'ASSISTANT:' if add_generation_prompt }}"""
"""Roles as words."""

TAGGED = """\
{%- for m in messages -%}
    {{ '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content + '<|im_end|>\\n' }}{%- endgeneration -%}
    {%- else -%}{{ m.content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Generation blocks."""

FAMILIES = {
    "instruction": INSTRUCTION,
    "ending": ENDING,
    "arguments": ARGUMENTS,
    "channels": CHANNELS,
    "thinking": THINKING,
    "joined": JOINED,
    "forced": FORCED,
    "plain": PLAIN,
}
"""The templates without generation blocks, by the habit that each imitates."""
