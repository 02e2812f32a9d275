"""The commands of `zaya`: the module whose `main` runs each, and a one-line summary."""

COMMANDS = {
    "train": ("zaya_jax.commands.train", "train a model, or resume a run"),
    "generate": ("zaya_jax.inference.command", "continue a prompt with a trained model"),
    "chat": ("zaya_jax.inference.chat.command", "chat with a model that was trained on chats"),
    "think": (
        "zaya_jax.inference.rsa.command",
        "answer a question from many sampled thoughts (Markovian RSA)",
    ),
    "serve": ("zaya_jax.serving.command", "serve a run with OpenAI's HTTP API and a chat page"),
    "eval": (
        "zaya_jax.inference.evaluation.command",
        "evaluate a trained model: bits per byte of texts, tasks of lm-eval",
    ),
    "data": ("zaya_jax.data.corpora.command", "build token corpora from text, and inspect them"),
    "tokenizer": ("zaya_jax.data.tokenizers.command", "train a tokenizer, or describe one"),
    "convert": ("zaya_jax.commands.convert", "convert weights to and from PyTorch"),
    "ckpt": ("zaya_jax.commands.checkpoint", "list, verify, compare, prune and rewrite a run's checkpoints"),
    "aegis": ("zaya_jax.aegis.command", "show a run's status, history and goodput"),
    "report": ("zaya_jax.report.command", "compare runs in one HTML file: curves, experts, configs"),
    "supervise": ("zaya_jax.commands.supervise", "run training to completion, restarting it after failures"),
    "launch": ("zaya_jax.commands.launch", "run a command in several processes on this machine"),
    "plan": ("zaya_jax.plan.command", "size a run: memory, time and communication on a cluster"),
    "doctor": ("zaya_jax.commands.doctor", "check what this machine can be used for, and what is missing"),
    "bench": ("zaya_jax.bench.command", "benchmark this machine against other libraries and its limits"),
    "completion": (
        "zaya_jax.completion.command",
        "print shell completion of commands, options and config fields",
    ),
}
