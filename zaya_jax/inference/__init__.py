"""Using a trained network: how a token is drawn, and the loop that writes text token by token.

`sampling` turns logits into a token; `decoding` is prefill and the loop, compiled; `generate` runs both for a
batch of prompts. `text` makes characters of tokens, and `completion` texts of prompts, with stop strings and
log-probabilities. `command` is `zaya generate`, with `batch_generation` for files of prompts; `chat_command`
is `zaya chat`, around `chat_loop`.
"""
