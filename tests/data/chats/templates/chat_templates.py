"""Chat templates like those on the hub, written for tests."""
# ruff: noqa: E501  (their lines are one string)

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{- content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
PHI = """\
{% for message in messages %}{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
DEEPSEEK = """\
{%- set ns = namespace(system='', first=true) %}
{%- for message in messages if message.role == 'system' %}
{%- set ns.system = ns.system ~ ('' if ns.first else '\\n\\n') ~ message.content %}{% set ns.first = false %}
{%- endfor %}
{{- bos_token ~ ns.system }}
{%- for message in messages if message.role != 'system' %}
{%- set content = message.content.split('</think>')[-1] | trim if message.role == 'assistant' else message.content %}
{{- '<|' ~ message.role ~ '|>' ~ content ~ (eos_token if message.role == 'assistant' else '') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
MACRO = """\
{%- macro turn(role, content) -%}
<|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro %}
{%- set parts = [] %}
{%- for m in messages %}{{ turn(m.role, m.content | lower) }}{% endfor %}
{%- if add_generation_prompt %}{{ ['<|im_start|>', 'assistant', '\\n'] | join }}{% endif %}"""
FORMATS = """\
{%- for m in messages %}
{{- '%s%s\\n' | format('<|im_start|>', m.role) }}
{{- '{}{end}\\n'.format(m.content[:40] | replace('\\t', ' '), end='<|im_end|>') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{{ 'ASSISTANT' | lower }}{{ '\\n' }}{% endif %}"""
JSON = """\
{%- for m in messages %}
{{- '<|im_start|>' }}{{ {'role': m.role, 'content': m.content} | tojson }}{{ '<|im_end|>' }}
{%- endfor %}"""
SET_BLOCK = """\
{%- for m in messages %}
{%- set text %}<|im_start|>{{ m.role }}
{{ m['content'].strip() }}
{% endset %}
{{- (text | trim) ~ '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt %}{% filter trim %}  <|im_start|>assistant {% endfilter %}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML, "gemma": GEMMA, "llama3": LLAMA3, "phi": PHI, "deepseek": DEEPSEEK, "macro": MACRO,
    "formats": FORMATS, "json": JSON, "set_block": SET_BLOCK,
}  # fmt: skip
SPECIALS = [
    "<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
