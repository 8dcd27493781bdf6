"""Chat templates in the styles of published models, and a tokenizer that has one of them."""

from __future__ import annotations

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level

SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]

# Qwen 2.5: a system message of its own where there is none.
CHATML = r"""
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

LLAMA_3 = r"""
{%- for message in messages -%}
{%- if loop.first -%}{{- '<|begin_of_text|>' -}}{%- endif -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""

# Qwen 3: thoughts are shown after the last question only, and then always.
STRIPS_THINKING = r"""
{%- set ns = namespace(last_question=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' -%}
{%- set thoughts = '' -%}
{%- set content = message.content -%}
{%- if '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last_question -%}
{{- '<think>\n' + thoughts + '\n</think>\n\n' -}}
{%- endif -%}
{{- content -}}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Gemma 2.
NO_SYSTEM_ROLE = r"""
{%- if messages[0].role == 'system' -%}
{{- raise_exception('System role not supported') -}}
{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

# Mistral: the system message goes into the last question, and nothing announces the answer.
SYSTEM_IN_LAST_QUESTION = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '[INST] ' + (system + '\n\n' if system and loop.last else '') + message.content + ' [/INST]' -}}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content + '<eos>' -}}
{%- endif -%}
{%- endfor -%}
"""

# A chat must end with a question, and a closing mark follows the whole.
REFUSES_PARTS = r"""
{%- if messages[-1].role != 'user' -%}
{{- raise_exception('the last message must be the user\'s') -}}
{%- endif -%}
{%- for message in messages -%}
{{- message.role + ': ' + message.content + '\n' -}}
{%- endfor -%}
{{- 'assistant: ' if add_generation_prompt else '<eos>' -}}
"""


def with_template(template: str) -> Tokenizer:
    hf = byte_level()
    hf.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    hf.chat_template = template
    return Tokenizer(hf)
