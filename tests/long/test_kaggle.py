"""More of tests/data/test_kaggle.py, which takes longer."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.data.archives import zipped
from tests.data.conftest import _at_home, kaggle
from tests.data.support import NOISE, downloaded, files
from tests.data.test_kaggle import CATS, TITANIC
from tests.fakes.kaggle_server import FakeKaggle, Stored
from tpunb.errors import DataError


def test_datasets_models_and_single_files(kaggle: FakeKaggle) -> None:
    kaggle.files |= {
        "datasets/me/cats/versions/2": Stored(zipped(**{"a.txt": b"two"})),
        "datasets/me/dogs/a.csv": Stored(b"plain"),
        "competitions/titanic/train.csv": Stored(b"1,2"),
        "models/google/gemma/pytorch/2b/1/w.bin": Stored(b"old"),
        "models/google/gemma/pytorch/2b/7/d/w.bin": Stored(b"new"),
    }
    assert files(downloaded(f"{CATS}/versions/2", "two")[0]) == {"a.txt": b"two"}
    assert files(downloaded(CATS, "latest")[0]) == {"a.txt": b"two"}
    assert files(downloaded("kaggle://datasets/me/dogs/a.csv", "one")[0]) == {"a.csv": b"plain"}
    # Files of several sources may be in one folder.
    assert set(files(downloaded(f"{TITANIC}/train.csv", "one")[0])) == {"a.csv", "train.csv"}
    assert files(downloaded("kaggle://models/google/gemma/PyTorch/2b")[0]) == {"d/w.bin": b"new"}
    old, _ = downloaded("kaggle://models/google/gemma/pytorch/2b/1", "old")
    assert files(old) == {"w.bin": b"old"}
    with pytest.raises(DataError, match="'torch' is not a valid ModelFramework"):
        downloaded("kaggle://models/google/gemma/torch/2b", "other")
    with pytest.raises(DataError, match="kagglehub always unpacks archives itself"):
        downloaded(CATS, "kept", unpack=False)


def test_a_lost_connection_is_resumed(kaggle: FakeKaggle) -> None:
    stored = Stored(zipped(x=NOISE), cut=[1_500_000])
    kaggle.files["datasets/me/cats"] = stored
    folder, _ = downloaded(CATS)
    assert files(folder) == {"x": NOISE}
    assert stored.reads[-1][0] == 1 << 20


def test_the_next_call_resumes(kaggle: FakeKaggle) -> None:
    stored = Stored(zipped(x=NOISE), cut=[2_000_000, *[0] * 20])
    kaggle.files["datasets/me/cats"] = stored
    with pytest.raises(DataError, match=r"no connection in 5 attempts .* run it again to resume"):
        downloaded(CATS)
    assert not Path("data").exists()
    stored.cut.clear()
    stored.reads.clear()
    folder, _ = downloaded(CATS)
    assert files(folder) == {"x": NOISE}
    assert stored.reads[-1][0] >= 1 << 20


def test_damage_and_parts_of_an_older_file_are_noticed(kaggle: FakeKaggle) -> None:
    wrong = base64.b64encode(bytes(16)).decode()
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"), md5=wrong)
    with pytest.raises(DataError, match="the actual MD5 checksum of the download"):
        downloaded(CATS)
    kaggle.files["datasets/me/cats"] = Stored(NOISE, cut=[1_500_000, *[0] * 20])
    with pytest.raises(DataError, match="no connection"):
        downloaded(CATS)
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=NOISE[::-1]))
    with pytest.raises(DataError, match="the actual MD5 checksum of the download"):
        downloaded(CATS)
    assert not Path("data").exists()
    assert files(downloaded(CATS)[0]) == {"x": NOISE[::-1]}


def test_wrong_credentials_and_none(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"))
    monkeypatch.setenv("KAGGLE_KEY", "an-older-key")
    with pytest.raises(DataError, match=r"authenticated.*\(tokens: https"):
        downloaded(CATS)
    monkeypatch.delenv("KAGGLE_USERNAME")
    monkeypatch.delenv("KAGGLE_KEY")
    with pytest.raises(DataError, match=r"authenticated.*\(tokens: https"):
        downloaded(TITANIC)
    kaggle.public = True
    assert files(downloaded(CATS)[0]) == {"x": b"1"}
