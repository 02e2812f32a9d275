"""The verbs of `zaya`: the module whose `main` each is, and what it does in a line."""

VERBS = {
    "train": ("zaya_jax.train_command", "train a model, or go on with a run"),
    "generate": ("zaya_jax.inference.command", "continue a prompt with a trained model"),
    "chat": ("zaya_jax.inference.chat_command", "a conversation with a model that has learned chats"),
    "think": ("zaya_jax.inference.think_command", "a question, thought about many times and put together"),
    "serve": ("zaya_jax.serving.command", "OpenAI's interface to a run, and a page to chat with it"),
    "eval": (
        "zaya_jax.inference.eval_command",
        "bits a byte of texts, and tasks of lm-eval, by a trained model",
    ),
    "data": ("zaya_jax.data.command", "make token corpora of text, and look at them"),
    "tokenizer": ("zaya_jax.data.tokenizer_command", "train a tokenizer, or say what one is"),
    "convert": ("zaya_jax.convert.command", "weights to and from PyTorch"),
    "ckpt": ("zaya_jax.checkpoint_command", "list, verify, compare, prune and rewrite a run's checkpoints"),
    "aegis": ("zaya_jax.aegis.command", "what befell a run, where it is, and its goodput"),
    "report": ("zaya_jax.report.command", "runs side by side in one HTML file: curves, experts, configs"),
    "supervise": ("zaya_jax.supervise_command", "a run that is begun anew, elsewhere or later, to its end"),
    "launch": ("zaya_jax.launch_command", "a verb in several processes of this machine"),
    "plan": ("zaya_jax.plan.command", "size a run: memory, time and communication on a cluster"),
    "doctor": ("zaya_jax.doctor_command", "what this machine can be used for, and what it lacks"),
    "bench": ("zaya_jax.bench.command", "measure this machine against others' code and physics"),
    "completion": ("zaya_jax.completion.command", "have a shell complete verbs, options and config fields"),
}
