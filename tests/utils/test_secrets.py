"""Recognising possible secrets."""

from __future__ import annotations

import pytest

from tpunb.utils.secrets import is_secret_name, is_secret_text, kept_value


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 30,
        "Bearer ghp_" + "A1" * 15,
        "sk-" + "x" * 20,
        "AKIA" + "ABCD1234" * 2,
        "https://me:word@host/x",
        "-----BEGIN RSA PRIVATE KEY-----",
        "{'db': {'password': 'x'}}",
    ],
)
def test_texts(text: str) -> None:
    assert is_secret_text(text)


def test_other_texts() -> None:
    texts = ("https://host:80/a@b", "sk-learn", "a sentence", "{'lr': 'x'}", "{'n_keys': 5}")
    assert not any(map(is_secret_text, texts))


@pytest.mark.parametrize(
    ("secret", "names"),
    [
        (True, "HF_TOKEN WANDB_API_KEY OPENAI_APIKEY AWS_SECRET_ACCESS_KEY DB_PASSWORD password"),
        (True, "token api-key Authorization X-Api-Key accessToken Cookie GMAIL_PASS CREDENTIALS"),
        (False, "TOKENIZERS_PARALLELISM max_tokens pad-token bos_token_id PWD sort-key seed lr"),
        (False, "MASTER_ADDR authuser text_key KEYBOARD XLA_FLAGS batch_size name path"),
    ],
)
def test_names_of_secrets(secret: bool, names: str) -> None:
    assert {is_secret_name(name) for name in names.split()} == {secret}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgres://me:s3cret@db/x"),
        ("HTTPS_PROXY", "http://u:s3cret@proxy:3128"),
        ("PIP_INDEX_URL", "https://s3cret@host/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://__token__:s3cret@x@host/"),
        ("REDIS_URL", "redis://:s3cret@h:1/0"),
        ("MODEL_URL", "https://acc.blob.core/x?sv=1&sig=s3cret"),
        ("DOWNLOAD", "https://s3/x?X-Amz-Signature=s3cret"),
        ("AZURE", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=s3cret=="),
        ("ODBC", "Driver=x;Server=y;Uid=u;Pwd=s3cret;"),
        ("ACCOUNT", '{"private_key":"s3cret"}'),
        ("SLACK", "https://hooks.slack.com/services/s3cret"),
        *((name, "s3cret") for name in ("GITHUB_PAT", "PGPASS", "SSHPASS", "MYSQL_PWD", "JWT")),
        *((name, "s3cret") for name in ("AZURE_SAS", "SENTRY_DSN", "DB_CONNECTION_STRING")),
    ],
)
def test_what_is_not_written_of_the_environment(name: str, value: str) -> None:
    assert "cret" not in kept_value(name, value)


def test_the_rest_of_the_environment_is_written() -> None:
    env = {
        "PATH": "/a:/b",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x --a=b",
        "LS_COLORS": "rs=0:di=01;34:ln=01",
        "JPY_SESSION_NAME": "/a/b.ipynb",
        "GCE_METADATA_HOST": "http://metadata/",
        "COMPASS": "n",
        "MAIL": "a@b",
    }
    assert {name: kept_value(name, value) for name, value in env.items()} == env
    assert kept_value("HTTP_PROXY", "http://u:p@proxy:3128") == "http://…@proxy:3128"
