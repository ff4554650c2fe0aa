from __future__ import annotations

import pytest

from tpunb.notebook.convert.secrets import find_secrets, is_secret_value, without_secrets


@pytest.mark.parametrize(
    ("text", "hidden", "variable"),
    [
        ("hf auth login --token abc", "hf auth login --token …", "HF_TOKEN"),
        ("huggingface-cli login --token abc", "huggingface-cli login --token …", "HF_TOKEN"),
        ("wandb login 0123", "wandb login …", "WANDB_API_KEY"),
        ("x --api-key=abc --n 1", "x --api-key=… --n 1", "API_KEY"),
        ("x --password 'a b' y", "x --password '…' y", "PASSWORD"),
        ("export A_TOKEN=abc; x", "export A_TOKEN=…; x", "A_TOKEN"),
        ("A_TOKEN=a\\ b x", "A_TOKEN=… x", "A_TOKEN"),
        (
            'wget --header "Authorization: Bearer a b" u',
            'wget --header "Authorization: Bearer …" u',
            "AUTHORIZATION",
        ),
        ("curl -H 'X-Api-Key: k' u", "curl -H 'X-Api-Key: …' u", "X_API_KEY"),
        ("curl -u me:pw u", "curl -u … u", "LOGIN"),
        ("curl 'https://h/p?token=abc&v=1'", "curl 'https://h/p?token=…&v=1'", "TOKEN"),
        ("git clone https://me:pw@h.org/a.git", "git clone https://…@h.org/a.git", "H_ORG_LOGIN"),
        ("pip install git+https://abc@h.org/a", "pip install git+https://…@h.org/a", "H_ORG_LOGIN"),
        ("""echo '{"user":"me","key":"abc"}'""", """echo '{"user":"me","key":"…"}'""", "KEY"),
        ('echo "{\\"key\\":\\"abc\\"}"', 'echo "{\\"key\\":\\"…\\"}"', "KEY"),
        ("echo abc | gh auth login --with-token", "echo … | gh auth login --with-token", None),
        ("aws configure set secret_key abc", "aws configure set secret_key …", "SECRET_KEY"),
        ("x ghp_0123456789012345678901234567", "x …", "GITHUB_TOKEN"),
    ],
)  # fmt: skip
def test_a_secret_is_found(text: str, hidden: str, variable: str | None) -> None:
    assert without_secrets(text) == hidden
    (secret,) = find_secrets(text)
    assert variable in (None, secret.variable)


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
def test_what_is_none_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_the_quote_that_is_open_around_a_secret() -> None:
    (secret,) = find_secrets('curl -H "Cookie: a=b; c=d" u')
    assert secret.quote == '"'
    (secret,) = find_secrets("x --token abc")
    assert secret.quote == ""


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WANDB_API_KEY", "abc", True),
        ("WANDB_API_KEY", "{key}", False),
        ("WANDB_API_KEY", "$key", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key.json", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("PASSWORD", "1234", True),
        ("PASSWORD", "", False),
    ],
)
def test_values_of_variables(name: str, value: str, expected: bool) -> None:
    assert is_secret_value(name, value) is expected
