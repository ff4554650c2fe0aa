"""Finding secrets: what is hidden stands between « and »."""

from __future__ import annotations

import re

import pytest

from tpunb.utils.secrets import (
    HIDDEN,
    find_secrets,
    is_secret_name,
    is_secret_text,
    is_secret_value,
    kept_value,
    without_secrets,
)


def plain(text: str) -> str:
    return re.sub("[«»]", "", text)


def hidden(text: str) -> str:
    return re.sub("«.*?»", HIDDEN, text)


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("hf auth login --token «abc»", "HF_TOKEN"),
        ("huggingface-cli login --token «abc»; x", "HF_TOKEN"),
        ("wandb login «0123»", "WANDB_API_KEY"),
        ("x --api-key=«abc» --n 1", "API_KEY"),
        ("x --password '«a b»' y", "PASSWORD"),
        ("export A_TOKEN=«abc»; x", "A_TOKEN"),
        ("A_TOKEN=«a\\ b» x", "A_TOKEN"),
        ('wget --header "Authorization: Bearer «a b»" u', "AUTHORIZATION"),
        ("curl -H 'X-Api-Key: «k»' u", "X_API_KEY"),
        ("curl -u «me:pw» u", "LOGIN"),
        ("curl 'https://h/p?token=«abc»&v=1'", "TOKEN"),
        ("curl https://h/p?X-Amz-Signature=«abc»&v=1", "X_AMZ_SIGNATURE"),
        ("git clone https://«me:pw»@h.org/a.git", "H_ORG_LOGIN"),
        ("pip install git+https://«abc»@h.org/a", "H_ORG_LOGIN"),
        ("""echo '{"user":"me","key":"«abc»"}'""", "KEY"),
        ('echo "{\\"key\\":\\"«abc»\\"}"', "KEY"),
        ("{'key': b'«abc»'}", "KEY"),
        ("echo «abc» | gh auth login --with-token", "PASSWORD"),
        ("aws configure set secret_key «abc»", "SECRET_KEY"),
        ("x «ghp_0123456789012345678901234567»", "GITHUB_TOKEN"),
    ],
)
def test_secret_of_a_command_is_found(text: str, variable: str) -> None:
    assert without_secrets(plain(text)) == hidden(text)
    (secret,) = find_secrets(plain(text))
    assert secret.variable == variable


@pytest.mark.parametrize(
    "text",
    [
        "git clone https://{token}@github.com/a/b",
        "git clone https://$USER:$TOKEN@github.com/a/b",
        "git clone git@github.com:a/b.git",
        "git clone ssh://git@github.com/a",
        "HF_TOKEN=$HF_TOKEN python x.py --token {token} --password ${PW}",
        "wget 'https://h/uc?id=1&confirm=t&authuser=0'",
        "pip install a@git+https://h/a@0123456789012345678901234567890123456789",
        "python x.py --pad-token '<pad>' --max_tokens 5 --use-auth-token true",
        "kaggle competitions download -c key",
        "python x.py --ssl-key-file ./key.pem",
    ],
)
def test_other_text_of_a_command_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_quote_that_is_open_around_a_secret() -> None:
    texts = 'curl -H "Cookie: a=b; c=d" u', "x --token abc"
    assert [secret.quote for text in texts for secret in find_secrets(text)] == ['"', ""]


def test_private_key_is_hidden_line_for_line() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"
    assert without_secrets(f"a\n{key}\nb --token c") == "a\n…\n…\n…\nb --token …"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WANDB_API_KEY", "{key}", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key.json", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("PASSWORD", "1234", True),
        ("PASSWORD", "", False),
    ],
)
def test_value_of_a_variable(name: str, value: str, expected: bool) -> None:
    assert is_secret_value(name, value) is expected


@pytest.mark.parametrize(
    ("secret", "names"),
    [
        (True, "HF_TOKEN WANDB_API_KEY OPENAI_APIKEY AWS_SECRET_ACCESS_KEY DB_PASSWORD password"),
        (True, "token api-key Authorization X-Api-Key accessToken Cookie GMAIL_PASS CREDENTIALS"),
        (True, "GITHUB_PAT PGPASS SSHPASS MYSQL_PWD JWT AZURE_SAS SENTRY_DSN DB_CONNECTION_STRING"),
        (False, "TOKENIZERS_PARALLELISM max_tokens pad-token bos_token_id PWD sort-key seed lr"),
        (False, "MASTER_ADDR authuser text_key KEYBOARD XLA_FLAGS batch_size name path"),
    ],
)
def test_names_of_secrets(secret: bool, names: str) -> None:
    assert {is_secret_name(name) for name in names.split()} == {secret}


def test_texts_that_have_the_form_of_a_secret() -> None:
    tokens = "hf_" + "a" * 30, "Bearer ghp_" + "A1" * 15, "sk-" + "x" * 20, "AKIA" + "ABCD1234" * 2
    others = "https://me:word@host/x", "-----BEGIN PRIVATE KEY-----", "{'db': {'password': 'x'}}"
    assert all(map(is_secret_text, (*tokens, *others)))
    texts = ("https://host:80/a@b", "sk-learn", "a sentence", "{'lr': 'x'}", "{'n_keys': 5}")
    assert not any(map(is_secret_text, texts))


@pytest.mark.parametrize(
    "value",
    [
        "postgres://«me:pw»@db/x",
        "https://«__token__:pw@x»@host/",
        "redis://«:pw»@h:1/0",
        "http://«u:p»@[::1]:3128",
        "«https://acc.blob.core/x?sv=1&sig=pw»",
        "«DefaultEndpointsProtocol=https;AccountName=a;AccountKey=pw==»",
        "«Driver=x;Server=y;Uid=u;Pwd={p;w};»",
        '«{"private_key":"pw"}»',
        "«https://hooks.slack.com/services/pw»",
        "--xla_dump_to=/tmp/x --a=b",
        "rs=0:di=01;34:ln=01",
        "http://metadata/",
        "a@b",
    ],
)
def test_what_is_written_of_the_environment(value: str) -> None:
    assert kept_value("A", plain(value)) == hidden(value)
