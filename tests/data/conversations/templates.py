"""Chat templates in the styles of well-known models, in words of our own, with marked answers.

`unmarked` is what most models are published with: the same without `{% generation %}` blocks.
"""

from __future__ import annotations

import re

_TURNS = "{% for turn in messages %}"

CHATML = (
    _TURNS + "<|im_start|>{{ turn.role }}\n"
    "{% if turn.role == 'assistant' %}{% generation %}{{ turn.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ turn.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The system's text goes into the first question; every round has its own begin and end of text.
LLAMA_2 = """
{%- set offset = 1 if messages[0].role == 'system' else 0 %}
{%- for turn in messages[offset:] %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('questions and answers must take turns') }}
    {%- endif %}
    {%- if turn.role == 'user' %}
        {%- set aim = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}
        {{- bos_token ~ '[INST] ' ~ (aim if loop.first and offset else '') }}
        {{- turn.content.strip() ~ ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' ~ turn.content.strip() ~ ' ' ~ eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

LLAMA_3 = """{{- bos_token }}
{%- for turn in messages %}
    {{- '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>\\n\\n' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{- turn.content | trim ~ '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- turn.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for turn in messages %}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{- ' ' ~ turn.content ~ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '[INST] ' ~ turn.content ~ ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('a system text is not known here') }}{%- endif %}
{%- for turn in messages %}
    {{- '<start_of_turn>' ~ ('model' if turn.role == 'assistant' else turn.role) ~ '\\n' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{- turn.content | trim }}<end_of_turn>{%- endgeneration %}
    {%- else %}
        {{- turn.content | trim }}<end_of_turn>
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

ZEPHYR = """
{%- for turn in messages %}
    {{- '<|' ~ turn.role ~ '|>\\n' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{- turn.content ~ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- turn.content ~ eos_token }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

PHI = """
{%- for turn in messages %}
    {{- '<|' ~ turn.role ~ '|>\\n' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{- turn.content }}<|end|>{%- endgeneration %}
    {%- else %}
        {{- turn.content }}<|end|>
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# Tools are listed, a default system text is given, calls are written as JSON, results come from the user.
QWEN = """
{%- set aim = messages[0].content if messages[0].role == 'system' else 'Be of help.' %}
{{- '<|im_start|>system\\n' ~ aim }}
{%- if tools %}
    {{- '\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for turn in messages if turn.role != 'system' %}
    {{- '<|im_start|>' ~ ('user' if turn.role == 'tool' else turn.role) ~ '\\n' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}
            {{- turn.content or '' }}
            {%- for call in turn.tool_calls or [] %}
                {{- '<call>' ~ call.function | tojson ~ '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- turn.content ~ '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thoughts stand before the last answer only: earlier turns are rendered anew once others follow.
THINKING = """
{%- for turn in messages %}
    {{- '<|im_start|>' ~ turn.role ~ '\\n' }}
    {%- if turn.role == 'assistant' and loop.last %}
        {{- '<think>' ~ turn.reasoning_content ~ '</think>' }}
    {%- endif %}
    {{- turn.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STYLES = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "phi": PHI,
    "qwen": QWEN,
}


def unmarked(template: str) -> str:
    """The template without its marks."""
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
