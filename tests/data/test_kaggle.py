"""kagglehub against a service that speaks Kaggle's protocol."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.data.support import NOISE, downloaded, files, zipped
from tests.fakes.kaggle_server import SECRET, FakeKaggle, Stored
from tpunb import data
from tpunb.data import DataOptions, KaggleSource, parse_kaggle
from tpunb.errors import DataError, MissingPackageError

TITANIC = "kaggle://competitions/titanic"
CATS = "kaggle://datasets/me/cats"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TITANIC, KaggleSource("competition", "titanic")),
        ("https://www.kaggle.com/c/titanic/data?x=1#y", KaggleSource("competition", "titanic")),
        (f"{CATS}/", KaggleSource("dataset", "me/cats")),
        (f"{CATS}/versions/3", KaggleSource("dataset", "me/cats/versions/3")),
        (
            "https://www.kaggle.com/models/google/gemma/PyTorch/2b/4",
            KaggleSource("model", "google/gemma/PyTorch/2b/4"),
        ),
        ("gs://bucket/x", None),
        ("https://example.org/kaggle.com/", None),
    ],
)
def test_parse(source: str, expected: KaggleSource | None) -> None:
    assert parse_kaggle(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "kaggle://competitions",
        "kaggle://datasets/cats",
        "kaggle://models/google/gemma/pytorch",
        "kaggle://code/me/notebook",
        "kaggle://datasets/../etc",
        f"{CATS}/../../x",
        f"{CATS}/a.csv",
    ],
)
def test_parse_refuses(source: str) -> None:
    with pytest.raises(DataError, match="the forms"):
        parse_kaggle(source)


def test_a_competition_is_downloaded_once(kaggle: FakeKaggle) -> None:
    content = {"train.csv": b"a,b\n" * 500, "deep/test.bin": NOISE}
    kaggle.files["competitions/titanic"] = Stored(zipped(**content))
    data.run(DataOptions(TITANIC), print)
    folder = Path("data/titanic")
    assert files(folder) == content
    assert folder.readlink() == Path(os.environ["KAGGLEHUB_CACHE"]) / "competitions/titanic"
    assert not kaggle.leaked
    requests = list(kaggle.asked)
    assert requests == [
        ("competitions.CompetitionApiService/DownloadDataFiles", {"competitionName": "titanic"})
    ]
    told = "titanic is already in data/titanic; nothing was downloaded"
    assert downloaded("https://www.kaggle.com/c/titanic", "data/titanic") == told
    assert kaggle.asked == requests
    shutil.rmtree(os.environ["KAGGLEHUB_CACHE"])
    assert not folder.exists()
    downloaded(TITANIC, "data/titanic")
    assert files(folder) == content


def test_datasets_and_models(kaggle: FakeKaggle) -> None:
    kaggle.files |= {
        "datasets/me/cats/versions/2": Stored(zipped(**{"a.txt": b"two"})),
        "models/google/gemma/pytorch/2b/7/d/w.bin": Stored(b"new"),
    }
    downloaded(CATS, "cats")
    assert files("cats") == {"a.txt": b"two"}
    asked = len(kaggle.asked)
    assert "already in cats; nothing" in downloaded(CATS, "cats")
    assert len(kaggle.asked) == asked
    downloaded("kaggle://models/google/gemma/PyTorch/2b", "gemma")
    assert files("gemma") == {"d/w.bin": b"new"}


def test_nothing_is_overwritten(kaggle: FakeKaggle) -> None:
    Path("mine").mkdir()
    Path("mine/a.txt").write_bytes(b"mine")
    with pytest.raises(DataError, match="mine already exists and does not come from me/cats"):
        downloaded(CATS, "mine")
    assert files("mine") == {"a.txt": b"mine"}
    assert not kaggle.asked
    kaggle.files["datasets/me/cats"] = kaggle.files["competitions/titanic"] = Stored(zipped(x=b""))
    downloaded(CATS, "other")
    with pytest.raises(DataError, match="other already exists and does not come from titanic"):
        downloaded(TITANIC, "other")


def test_what_kaggle_refuses(kaggle: FakeKaggle) -> None:
    kaggle.files["competitions/titanic"] = Stored(zipped(x=b""))
    kaggle.rules.add("titanic")
    for source, words in [
        (TITANIC, r"accepted the competition rules .*/competitions/titanic/rules"),
        (CATS, r"404 Client Error[^$]*specified the correct resource"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            downloaded(source, "to")
        assert kaggle.key not in str(caught.value)
    assert not Path("to").exists()


def test_without_kagglehub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kagglehub", None)
    with pytest.raises(MissingPackageError, match=r"kagglehub .*pip install .*'tpunb\[kaggle\]'`"):
        downloaded(CATS, "to")


@pytest.mark.parametrize(
    ("source", "path", "mount"),
    [
        (TITANIC, "competitions/titanic", "titanic"),
        (CATS, "datasets/me/cats", "datasets/me/cats"),
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
    kaggle.mounts[path] = mount
    monkeypatch.setenv("KAGGLE_CACHE_MOUNT_FOLDER", str(tmp_path / "input"))
    for name, value in kaggle.notebook_environ.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        downloaded(source, "deep/data")
        assert Path("deep/data").resolve() == place


def test_no_secret_is_shown_or_kept(
    kaggle: FakeKaggle, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=NOISE), cut=[1000, *[0] * 20])
    with pytest.raises(DataError) as caught:
        downloaded(CATS, "to")
    seen = str(caught.value) + "".join(capfd.readouterr())
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (kaggle.key, SECRET, "5ec2e7", kaggle.login.split()[1]):
        assert secret not in seen
        assert secret.encode() not in kept
