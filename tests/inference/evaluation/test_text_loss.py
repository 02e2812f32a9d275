"""Bits per byte of texts, compared with the logits of their windows."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from small_runs import make_base, small_values

from zaya_jax import cli
from zaya_jax.config import Config
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.inference.evaluation.scoring import make_scorer
from zaya_jax.inference.evaluation.text_loss import Text, TextLoss, evaluate_texts
from zaya_jax.model.zaya import Zaya

CONTEXT = 64
TEXTS = {
    "short.txt": "x",
    "windows line ends.txt": "one\r\ntwo\r\n",
    "accents.txt": "é€𝄞" * 9,
    "long.txt": "".join(f"def f{i}(left, right):\n    return left + {i}\n" for i in range(9)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns folder, model and weights of a run with random weights, and texts."""
    folder = tmp_path_factory.mktemp("run").resolve()
    for name, text in TEXTS.items():
        (folder / name).write_bytes(text.encode())
    values = small_values(run_folder=str(folder / "random"), corpus="none")
    variables = make_base(folder / "random", values)
    config = Config.from_dict(values)
    return folder, Zaya(config.model, config.execution), variables


@functools.partial(jax.jit, static_argnames="model")
def log_probs(model, variables, tokens_BT):
    return jax.nn.log_softmax(model.apply(variables, tokens_BT).logits_BTV, axis=-1)


def expected_nats(run, text):
    """Returns the loss of each byte: windows follow each other, and the last one starts earlier."""
    _, model, variables = run
    tokens = [2, *ByteTokenizer().encode(text)]
    nats = []
    while len(nats) < len(tokens) - 1:
        end = min(len(nats) + CONTEXT, len(tokens) - 1)
        begin = max(end - CONTEXT, 0)
        tokens_1T = np.zeros((1, CONTEXT), np.int32)
        tokens_1T[0, : end - begin] = tokens[begin:end]
        actual = np.asarray(log_probs(model, variables, tokens_1T))[0]
        places = range(len(nats) - begin, end - begin)
        nats += [-float(actual[place, tokens[begin + place + 1]]) for place in places]
    return nats


def evaluate(folder, *words):
    cli.main(["eval", str(folder / "random"), f"--json={folder}/out.json", *words])
    return json.loads((folder / "out.json").read_text())


def test_bits_per_byte_match_the_logits(run, capsys):
    folder = run[0]
    actual = evaluate(folder, "--text", *(str(folder / name) for name in TEXTS))
    assert (actual["step"], actual["context"]) == (1, CONTEXT)
    sums = np.zeros(2)
    for name, text in TEXTS.items():
        file = next(each for each in actual["text"]["files"] if each["name"] == str(folder / name))
        nats, num_bytes = expected_nats(run, text), len(text.encode())
        assert (file["num_bytes"], file["num_tokens"]) == (num_bytes, num_bytes)
        assert file["nats"] == pytest.approx(sum(nats), rel=1e-5)
        assert file["bits_per_byte"] == pytest.approx(sum(nats) / num_bytes / math.log(2), rel=1e-5)
        assert file["perplexity"] == pytest.approx(math.exp(sum(nats) / num_bytes), rel=1e-4)
        sums += sum(nats), num_bytes
        settings = f"{num_bytes:,} tokens, contexts of {CONTEXT} tokens"
        assert [file["name"], "bits_per_byte", file["bits_per_byte"], settings] in [
            list(figure.values()) for figure in actual["figures"]
        ]
    total = actual["text"]["total"]
    assert total["nats"] == pytest.approx(sums[0], rel=1e-5)
    assert total["bits_per_byte"] == pytest.approx(sums[0] / sums[1] / math.log(2), rel=1e-5)
    out = capsys.readouterr().out
    assert f"{total['bits_per_byte']:.4f}" in out
    assert "in all" in out


def test_loss_by_position_matches_the_logits(run):
    folder, text = run[0], TEXTS["long.txt"]
    actual = evaluate(folder, "--text", str(folder / "long.txt"))["text"]
    nats = np.array(expected_nats(run, text))
    last = len(nats) // CONTEXT * CONTEXT
    read = np.arange(len(nats)) % CONTEXT + 1
    read[last:] += CONTEXT - (len(nats) - last)  # the last window starts earlier
    assert last < len(nats)
    assert [(each["first"], each["last"]) for each in actual["positions"]] == [
        (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 64)
    ]  # fmt: skip
    for each in actual["positions"]:
        chosen = nats[(read >= each["first"]) & (read <= each["last"])]
        assert each["num_tokens"] == len(chosen)
        assert each["nats"] == pytest.approx(chosen.sum(), rel=1e-5)
    assert sum(each["nats"] for each in actual["positions"]) == pytest.approx(
        actual["total"]["nats"], rel=1e-5
    )


def test_bytes_are_counted_in_the_text(run):
    _, model, variables = run
    scorer = make_scorer(model, variables, length=CONTEXT, prefix_id=2)
    tokens_N = np.array([5, 6, 7], np.uint32)
    few, many = (evaluate_texts(scorer, [Text("a", size, tokens_N)]).total.to_json() for size in (3, 30))
    assert few["bits_per_byte"] == pytest.approx(10 * many["bits_per_byte"])
    assert few["nats_per_token"] == many["nats_per_token"]


def test_context_and_batch_size_options(run):
    folder = run[0]
    actual = evaluate(folder, "--context=16", "--batch-size=3", "--text", str(folder / "long.txt"))
    assert actual["context"] == 16
    assert actual["text"]["positions"][-1]["last"] == 16


def test_progress_counts_each_token_once(run):
    _, model, variables = run
    scorer = make_scorer(model, variables, length=CONTEXT, prefix_id=2, num_rows=1)
    counts = []
    evaluate_texts(scorer, [Text("a", 1, np.full(150, 5, np.uint32))], advance=counts.append)
    assert sorted(counts) == [22, 64, 64]


def test_perplexity_overflow_is_infinity():
    assert TextLoss("a", 1, 1, 1000.0).perplexity == math.inf
