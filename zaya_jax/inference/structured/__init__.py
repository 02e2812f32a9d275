"""Structured output: answers that a grammar constrains, such as JSON of a schema, by masks of allowed tokens.

- `grammar`: JSON schemas as grammars, with the checks that need no library.
- `tool_calls`: the grammar of tool calls in the markup of a chat template.
- `compiler`: compiles grammars for a tokenizer with llguidance, after a separate process has shown that this
  is cheap (`grammar_process`).
- `constraint`: the state of one text in its grammar, and the mask of its next token.
"""
