"""Chat templates in the styles of published models that think."""

from __future__ import annotations

from tests.text.chat_templates import STRIPS_THINKING

_CALLS = r"""
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}
{%- endfor -%}
"""
_TOOLS = r"""
{%- if tools -%}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
"""

# Qwen3: the model writes both marks; earlier thoughts are shown after the last question only.
QWEN3 = (
    _TOOLS
    + r"""
{%- set ns = namespace(last_question=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last_question
       and message.reasoning_content -%}
{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- message.content.lstrip('\n') if message.role == 'assistant' else message.content -}}
"""
    + _CALLS
    + r"""
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}
"""
)
# Qwen3.5: the same, but the prompt opens the thoughts.
QWEN3_5 = QWEN3.replace(
    r"{{- '<think>\n\n</think>\n\n' -}}",
    r"{{- '<think>\n\n</think>\n\n' -}}{%- else -%}{{- '<think>\n' -}}",
)
# Nemotron 3: every earlier answer has a pair of marks, which is empty unless thoughts are kept.
NEMOTRON_3 = r"""
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' -%}
{%- if message.reasoning_content and truncate_history_thinking is defined
       and not truncate_history_thinking -%}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n' -}}
{%- else -%}
{{- '<think></think>' -}}
{%- endif -%}
{%- endif -%}
{{- message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{{- '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\n' -}}
{%- endif -%}
"""
# LFM2.5 and Falcon-H1R: thoughts are looked for in the content.
LFM2_5 = r"""
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and not (keep_past_thinking | default(false)) -%}
{%- if '</think>' in content -%}
{%- set content = content.split('</think>')[-1] | trim -%}
{%- endif -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# DeepSeek-R1: the same, but the prompt opens the thoughts.
DEEPSEEK_R1 = LFM2_5.replace(
    r"{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
    r"{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
)
# Granite 3.2: only the system message says how.
GRANITE = r"""
{%- if thinking -%}
{{- '<|im_start|>system\nWrite your thoughts after \'Here is my thought process:\' and write your '
    + 'response after \'Here is my response:\'<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
OLD_QWEN3 = STRIPS_THINKING
