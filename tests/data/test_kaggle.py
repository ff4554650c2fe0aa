"""kagglehub against a service that speaks Kaggle's protocol."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.archives import zipped
from tests.data.support import NOISE, downloaded, files
from tests.fakes.kaggle_server import SECRET, FakeKaggle, Stored
from tpunb.data import KaggleSource, parse_kaggle
from tpunb.errors import DataError, MissingPackageError

TITANIC = "kaggle://competitions/titanic"
CATS = "kaggle://datasets/me/cats"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TITANIC, KaggleSource("competitions", "titanic")),
        (f"{TITANIC}/a/train.csv", KaggleSource("competitions", "titanic", "a/train.csv")),
        ("https://www.kaggle.com/c/titanic/data?x=1#y", KaggleSource("competitions", "titanic")),
        (
            "https://kaggle.com/competitions/titanic/overview",
            KaggleSource("competitions", "titanic"),
        ),
        (CATS, KaggleSource("datasets", "me/cats")),
        (f"{CATS}/versions/3", KaggleSource("datasets", "me/cats/versions/3")),
        (f"{CATS}/a.csv", KaggleSource("datasets", "me/cats", "a.csv")),
        (
            "https://www.kaggle.com/models/google/gemma/PyTorch/2b/4",
            KaggleSource("models", "google/gemma/PyTorch/2b/4"),
        ),
        ("gs://bucket/x", None),
        ("https://example.org/kaggle.com/", None),
    ],
)
def test_parse(source: str, expected: KaggleSource | None) -> None:
    assert parse_kaggle(source) == expected
    if expected is not None:
        assert parse_kaggle(expected.url) == expected


@pytest.mark.parametrize(
    "source",
    [
        "kaggle://competitions",
        "kaggle://datasets/cats",
        "kaggle://models/google/gemma/pytorch",
        "kaggle://models/a/b/c/d/e",
        "kaggle://code/me/notebook",
        "kaggle://datasets/../etc",
        "kaggle://datasets/me/cats/../../x",
    ],
)
def test_parse_refuses(source: str) -> None:
    with pytest.raises(DataError, match=r"the forms|not the number of a version"):
        parse_kaggle(source)


def test_a_competition_is_downloaded_once(kaggle: FakeKaggle) -> None:
    content = {"train.csv": b"a,b\n" * 500, "deep/test.bin": NOISE}
    kaggle.files["competitions/titanic"] = Stored(zipped(**content))
    folder, messages = downloaded(TITANIC)
    assert folder == Path("data/titanic")
    assert files(folder) == content
    cached = Path(os.environ["KAGGLEHUB_CACHE"]) / "competitions/titanic"
    assert folder.readlink() == cached
    assert messages == f"{TITANIC} is in {folder}, a link to {cached}"
    assert not kaggle.leaked
    requests = list(kaggle.asked)
    assert requests == [
        ("competitions.CompetitionApiService/DownloadDataFiles", {"competitionName": "titanic"})
    ]
    again, messages = downloaded("https://www.kaggle.com/c/titanic")
    assert (again, kaggle.asked) == (folder, requests)
    assert messages == f"{TITANIC} is already in data/titanic; nothing was downloaded"


def test_a_cache_that_was_emptied_is_filled_again(kaggle: FakeKaggle) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"))
    folder, _ = downloaded(CATS)
    shutil.rmtree(os.environ["KAGGLEHUB_CACHE"])
    assert not folder.exists()
    downloaded(CATS)
    assert files(folder) == {"x": b"1"}


def test_nothing_is_overwritten(kaggle: FakeKaggle) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(**{"a.txt": b"new"}))
    folder = Path("data/cats")
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"mine")
    with pytest.raises(DataError, match="data/cats already exists and does not come from"):
        downloaded(CATS)
    assert files(folder) == {"a.txt": b"mine"}
    assert not kaggle.asked
    downloaded(CATS, "other")
    kaggle.files["competitions/titanic"] = Stored(zipped(x=b"1"))
    with pytest.raises(DataError, match="other already exists and does not come from"):
        downloaded(TITANIC, "other")


def refuse_rules(kaggle: FakeKaggle) -> None:
    kaggle.rules.add("titanic")


def forbid(kaggle: FakeKaggle) -> None:
    kaggle.private.add("datasets/me/cats")


@pytest.mark.parametrize(
    ("source", "before", "words"),
    [
        (TITANIC, refuse_rules, r"accepted the competition rules .*/competitions/titanic/rules"),
        (CATS, forbid, "authenticated if you are trying to access a private"),
        ("kaggle://datasets/me/catz", None, "404 Client Error. .*specified the correct resource"),
    ],
)
def test_what_kaggle_refuses(
    kaggle: FakeKaggle, source: str, before: Callable[[FakeKaggle], None] | None, words: str
) -> None:
    kaggle.files["competitions/titanic"] = kaggle.files["datasets/me/cats"] = Stored(zipped(x=b""))
    if before is not None:
        before(kaggle)
    with pytest.raises(DataError, match=words) as caught:
        downloaded(source)
    assert kaggle.key not in str(caught.value)
    assert not Path("data").exists()


def test_no_way_to_kaggle(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no server listens
    with pytest.raises(DataError, match=r"no connection .*is this machine on"):
        downloaded(TITANIC)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    with pytest.raises(DataError, match=r"turn Internet on .* or add the data with «Add Input»"):
        downloaded(TITANIC)


def test_without_kagglehub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kagglehub", None)
    with pytest.raises(MissingPackageError, match=r"kagglehub .* `pip install 'tpunb\[kaggle\]'`"):
        downloaded(CATS)


@pytest.mark.parametrize(
    ("source", "path", "mount"),
    [
        (TITANIC, "competitions/titanic", "competitions/titanic"),
        (TITANIC, "competitions/titanic", "titanic"),
        (CATS, "datasets/me/cats", "datasets/me/cats"),
        (
            "kaggle://models/google/gemma/PyTorch/2b",
            "models/google/gemma/PyTorch/2b",
            "models/google/gemma/pytorch/2b/10",
        ),
    ],
)
def test_inside_kaggle_what_is_mounted_is_used(
    kaggle: FakeKaggle,
    source: str,
    path: str,
    mount: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "input" / mount
    place.mkdir(parents=True)
    (place / "a.csv").write_bytes(b"1")
    kaggle.mounts[path] = mount
    monkeypatch.setenv("KAGGLE_CACHE_MOUNT_FOLDER", str(tmp_path / "input"))
    for name, value in kaggle.notebook_environ.items():
        monkeypatch.setenv(name, value)
    folder, messages = downloaded(source, "deep/data")
    assert (folder, folder.resolve()) == (Path("deep/data"), place)
    assert messages == f"{parse_kaggle(source).url} is in deep/data, a link to {place}"
    downloaded(source, "deep/data")
    assert files(downloaded(f"{TITANIC}/a.csv", "one")[0] if path[0] == "c" else folder) == {
        "a.csv": b"1"
    }


def test_no_secret_is_shown_or_kept(
    kaggle: FakeKaggle, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=NOISE), cut=[1000, *[0] * 20])
    with pytest.raises(DataError) as caught:
        downloaded(CATS)
    seen = str(caught.value) + "".join(capfd.readouterr())
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (kaggle.key, SECRET, "5ec2e7", kaggle.login.split()[1]):
        assert secret not in seen
        assert secret.encode() not in kept


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/data.md"
    [code] = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert capsys.readouterr().out == "['KAGGLE_API_ENVIRONMENT', 'http_proxy']\n"
