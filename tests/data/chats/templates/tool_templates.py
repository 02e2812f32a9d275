"""Chat templates with tools, as on the hub: in the markups of ZAYA1, of Qwen 2.5 and Hermes, and of Qwen3-Coder."""
# ruff: noqa: E501  (their lines are one string)

ZAYA1 = """\
{{- bos_token -}}
{%- macro render_tool_call(tool_call) -%}
    {%- if tool_call['function'] is defined -%}{%- set tool_call = tool_call['function'] -%}{%- endif -%}
    {{- '<zyphra_tool_call>\\n<function=' ~ tool_call['name'] ~ '>\\n' -}}
    {%- for name, value in tool_call['arguments'] | items -%}
        {{- '<parameter=' ~ name ~ '>\\n' -}}
        {{- (value | tojson | safe) if value is mapping or (value is sequence and value is not string) else (value | string) -}}
        {{- '\\n</parameter>\\n' -}}
    {%- endfor -%}
    {{- '</function>\\n</zyphra_tool_call>\\n' -}}
{%- endmacro -%}
{%- set loop_messages = messages -%}
{%- set has_system = messages | length > 0 and messages[0]['role'] == 'system' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- messages[0]['content'] -}}{%- set loop_messages = messages[1:] -%}{%- endif -%}
    {%- if tools -%}
        {{- '\\n\\n# Tools\\n\\n<tools>' -}}
        {%- for tool in tools -%}
            {%- if tool['function'] is defined -%}{%- set tool = tool['function'] -%}{%- endif -%}
            {{- '\\n<function>\\n<name>' ~ tool['name'] ~ '</name>' -}}
            {%- if tool['description'] is defined -%}{{- '\\n<description>' ~ (tool['description'] | trim) ~ '</description>' -}}{%- endif -%}
            {%- if tool['parameters'] is defined -%}{{- '\\n<parameters>' ~ (tool['parameters'] | tojson | safe) ~ '</parameters>' -}}{%- endif -%}
            {{- '\\n</function>' -}}
        {%- endfor -%}
        {{- '\\n</tools>\\n\\n<zyphra_tool_call>\\n<function=example>\\n</function>\\n</zyphra_tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- if message['content'] is string -%}{{- message['content'] -}}{%- endif -%}
        {%- if message['tool_calls'] is defined and message['tool_calls'] -%}
            {%- for tool_call in message['tool_calls'] -%}{{- render_tool_call(tool_call) -}}{%- endfor -%}
        {%- endif -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message['role'] == 'tool' -%}
        {{- '<|im_start|>user\\n<zyphra_tool_response>\\n' ~ message['content'] ~ '\\n</zyphra_tool_response>\\n<|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}{% generation %}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3_CODER = ZAYA1.replace("zyphra_tool_", "tool_")
# Fails for content that is null, but not for empty content.
NEEDS_CONTENT = HERMES.replace(
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}", "{{- '\\n' + message.content }}"
)
TOOL_TEMPLATES = {"zaya_xml": ZAYA1, "hermes": HERMES, "qwen3_coder": QWEN3_CODER}
