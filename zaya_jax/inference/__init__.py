"""Using a trained network: how a token is drawn, and the loop that writes text token by token.

`sampling` turns logits into a token; `decoding` is prefill and the loop, compiled; `generate` runs both for a
batch of prompts. `engine` writes for requests that come and go: `slots` are its compiled programs, `prefixes`
what texts begin alike with, `generation` what it is asked and answers; `continuer` asks it for one text after
another. `text` makes characters of tokens, and `completion` texts of prompts, with stop strings and
log-probabilities. `command` is `zaya generate`, with `batch_generation` for files of prompts; `chat_command`
is `zaya chat`, around `chat_loop`; `think_command` is `zaya think`, around `markovian_rsa`. `scoring` says
how likely tokens are, which `requests` cuts to a context and packs into rows; `text_loss` is what that makes
of texts, and `tasks` what lm-eval makes of it, to which `harness` answers.
"""
