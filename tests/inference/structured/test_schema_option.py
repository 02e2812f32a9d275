"""The option `--json-schema`: what is refused before a run is read."""

import argparse
import json

import pytest

from zaya_jax.errors import UserError
from zaya_jax.inference.structured import compiler
from zaya_jax.inference.structured.schema_option import read_schema_option


def options_of(path):
    return argparse.Namespace(json_schema=None if path is None else str(path))


def test_a_schema_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert '"integer"' in read_schema_option(options_of(path)).source
    assert read_schema_option(options_of(None)) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"--json-schema is .*schema\.json, which is not a file"),
        ("[1]", "must be a JSON object"),
        ("{", "is not JSON"),
        ('{"$ref": "a.json"}', r'schema\.json refers to "a\.json"'),
    ],
)
def test_files_that_are_refused(tmp_path, content, says):
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says):
        read_schema_option(options_of(path))


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"--json-schema needs llguidance, which is not installed: .* install"
    ):
        read_schema_option(options_of(tmp_path / "schema.json"))
