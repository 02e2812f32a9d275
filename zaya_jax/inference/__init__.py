"""Using a trained network: how a token is drawn, and the loop that writes text token by token.

`sampling` turns logits into a token; `decoding` is prefill and the loop, compiled; `generate` runs both for a
batch of prompts, or streams one for a terminal. `scoring` says how likely tokens are, which `requests` cuts
to a context and packs into rows; `text_loss` is what that makes of texts, and `tasks` what lm-eval
makes of it, to which `harness` answers.
"""
