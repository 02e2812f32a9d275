"""Corpora of labeled answers: records, answers next to each other, and labels."""

import json

import numpy as np
import pytest

from zaya_jax.data.chats.labeled_corpus import build_labeled_corpus
from zaya_jax.data.chats.labeled_records import read_labeled_answers, with_other_answers
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.corpora.command import main
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.batch import chosen_answers
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError

LENGTH = 96
TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format(None, TOKENIZER)


def labeled(prompt, completion, label):
    return json.dumps({"prompt": prompt, "completion": completion, "label": label})


def records():
    """Votes on answers to 9 prompts, some with several answers, and two pairs."""
    votes = [labeled(f"q{i // 2}", f"answer {i}", i % 3 == 0) for i in range(18)]
    pairs = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(2)]
    return [*votes, *map(json.dumps, pairs)]


@pytest.fixture(name="source")
def fixture_source(tmp_path):
    (tmp_path / "votes.jsonl").write_text("\n".join(records()))
    return tmp_path / "votes.jsonl"


def read(source):
    return list(read_labeled_answers(source))


def test_votes_and_pairs_are_read(source, tmp_path):
    answers = read(source)
    assert len(answers) == 18 + 4
    assert [each.is_desirable for each in answers[-4:]] == [True, False, True, False]
    assert [each.answer[0].content for each in answers[-4:]] == ["good 0", "bad 0", "good 1", "bad 1"]
    as_messages = labeled(
        [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}], True
    )  # fmt: skip
    (tmp_path / "one.jsonl").write_text(as_messages)
    (answer,) = read(tmp_path / "one.jsonl")
    assert (answer.prompt[0].content, answer.answer[0].content, answer.is_desirable) == ("q", "a", True)


@pytest.mark.parametrize("percent", [0, 30])
def test_each_answer_has_one_to_another_prompt(source, percent):
    """Of the same label; and the others are together nearly the answers themselves, as in TRL's rotation."""
    pairs = list(with_other_answers(read(source), validation_percent=percent))
    assert len(pairs) == 22
    assert all(own.prompt != other.prompt for own, other in pairs)
    if not percent:
        assert all(own.is_desirable == other.is_desirable for own, other in pairs)
        assert len({other.answer for _, other in pairs}) > 11


def test_windows_have_labels_and_both_answers(source, tmp_path):
    report = build_labeled_corpus(
        tmp_path / "corpus", source=source, tokenizer=TOKENIZER, sequence_length=LENGTH
    )
    assert open_corpus(tmp_path / "corpus").unpaired
    found = {}
    for split in ("train", "validation"):
        for batch in evaluation_batches(report.corpus, split=split, sequence_length=LENGTH, batch_size=4):
            is_chosen_BT = chosen_answers(batch)
            for row, segments_T in enumerate(batch.segments_BT):
                for segment in range(1, segments_T.max() + 1, 2):
                    own_T, other_T = segments_T == segment, segments_T == segment + 1
                    labels = batch.labels_BT[row]
                    assert not labels[other_T].any()
                    assert not is_chosen_BT[row, other_T].any()
                    first, *rest = labels[own_T]
                    assert not any(rest)
                    assert (is_chosen_BT[row, own_T] == (first > 0)).all()
                    own, other = (tuple(batch.tokens_BT[row, each].tolist()) for each in (own_T, other_T))
                    found[own] = first > 0
                    # The same prompt, and another answer.
                    assert own != other
                    assert own[:8] == other[:8]
                    learned = batch.targets_BT[row, own_T & (batch.weights_BT[row] > 0)]
                    assert TOKENIZER.decode(learned.tolist()).startswith(("answer", "good", "bad"))
    assert len(found) == 22
    for answer in read(source):
        (token_ids,) = [each for each in found if is_that(answer, each)]
        assert found[token_ids] == answer.is_desirable


def is_that(answer, token_ids):
    """Returns whether tokens are a prompt and an answer to it, by the encoding of the whole conversation."""
    (chat,) = FORMAT.encode_all([ChatInput(answer.prompt + answer.answer)])
    return tuple(chat.tokens_T.tolist()) == token_ids


def test_counts_of_learned_tokens_exclude_the_label(source, tmp_path):
    report = build_labeled_corpus(
        tmp_path / "corpus", source=source, tokenizer=TOKENIZER, sequence_length=LENGTH
    )
    weights = sum(
        float(np.asarray(batch.weights_BT).sum())
        for split in ("train", "validation")
        for batch in evaluation_batches(report.corpus, split=split, sequence_length=LENGTH, batch_size=4)
    )
    assert sum(report.num_learned.values()) == weights


def test_the_command_builds_it(source, tmp_path, capsys):
    arguments = ["--source", str(source), "--unpaired", f"--sequence-length={LENGTH}"]
    main(["preferences", str(tmp_path / "corpus"), *arguments])
    assert "answers" in capsys.readouterr().out
    assert open_corpus(tmp_path / "corpus").unpaired


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (labeled("q", "a", 1), ":1 has the label 1; it must be true"),
        (json.dumps({"prompt": "q", "completion": "a"}), ":1 has the label None; it must be true"),
        (json.dumps({"completion": "a", "label": True}), ':1 has no prompt; add the "prompt"'),
        (json.dumps({"prompt": "q", "label": True}), ":1 has no completion"),
        (labeled("q", "a", True), "all answers have the same prompt; at least two different"),
    ],
)
def test_invalid_records_are_reported(line, message, tmp_path):
    source = tmp_path / "votes.jsonl"
    source.write_text(line)
    with pytest.raises(UserError, match=message):
        build_labeled_corpus(tmp_path / "corpus", source=source, tokenizer=TOKENIZER, sequence_length=LENGTH)
