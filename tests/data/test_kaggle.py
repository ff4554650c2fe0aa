"""Kaggle's own client against a service that speaks its protocol."""

from __future__ import annotations

import base64
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.archives import member, tarred, zipped
from tpunb.data import kaggle as of_kaggle
from tpunb.data.bring import bring
from tpunb.data.fake_kaggle import SECRET, FakeKaggle, Stored
from tpunb.data.kaggle import Thing, parse
from tpunb.errors import DataError, SetupError

NOISE = random.Random(0).randbytes(3_000_000)
TITANIC = "kaggle://competitions/titanic"


def brought(source: str, to: str | None = None, **options: bool) -> tuple[Path, str]:
    said: list[str] = []
    there = bring(source, Path(to) if to else None, os.environ, said.append, **options)
    return there, "\n".join(said)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".tpunb-data" not in path.parts
    }


@pytest.mark.parametrize(
    ("source", "thing"),
    [
        (TITANIC, Thing("competitions", ("titanic",))),
        (f"{TITANIC}/a/train.csv", Thing("competitions", ("titanic",), None, "a/train.csv")),
        ("https://www.kaggle.com/c/titanic/data?x=1#y", Thing("competitions", ("titanic",))),
        ("https://kaggle.com/competitions/titanic/overview", Thing("competitions", ("titanic",))),
        ("kaggle://datasets/me/cats", Thing("datasets", ("me", "cats"))),
        ("kaggle://datasets/me/cats/versions/3", Thing("datasets", ("me", "cats"), 3)),
        ("kaggle://datasets/me/cats/a.csv", Thing("datasets", ("me", "cats"), None, "a.csv")),
        (
            "https://www.kaggle.com/models/google/gemma/PyTorch/2b/4",
            Thing("models", ("google", "gemma", "PyTorch", "2b"), 4),
        ),
        ("gs://bucket/x", None),
        ("https://example.org/kaggle.com/", None),
    ],
)
def test_what_a_source_names(source: str, thing: Thing | None) -> None:
    assert parse(source) == thing
    if thing is not None:
        assert parse(thing.url) == thing


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
def test_what_names_nothing(source: str) -> None:
    with pytest.raises(DataError, match=r"is none of|not the number of a version"):
        parse(source)


def test_a_competition_is_fetched_unpacked_and_not_fetched_again(kaggle: FakeKaggle) -> None:
    content = {"train.csv": b"a,b\n" * 500, "deep/test.bin": NOISE}
    kaggle.files["competitions/titanic"] = Stored(zipped(**content))
    there, said = brought(TITANIC)
    assert there == Path("data/titanic")
    assert files(there) == content
    assert said == (
        f"{TITANIC}: 2 files, 3.0 MB in data/titanic (credentials: KAGGLE_USERNAME and KAGGLE_KEY)"
    )
    assert sorted(os.listdir(there / ".tpunb-data")) == ["record.json"]
    assert not kaggle.leaked
    asked = list(kaggle.asked)
    assert asked == [
        ("competitions.CompetitionApiService/DownloadDataFiles", {"competitionName": "titanic"})
    ]

    again, said = brought("https://www.kaggle.com/c/titanic")
    assert (again, kaggle.asked) == (there, asked)
    assert said.endswith("is in data/titanic already (2 files, 3.0 MB); nothing was fetched")

    (there / "train.csv").unlink()
    brought(TITANIC)
    assert files(there) == content


def test_datasets_and_models_and_single_files(kaggle: FakeKaggle) -> None:
    kaggle.files |= {
        "datasets/me/cats/versions/2": Stored(zipped(**{"a.txt": b"two"})),
        "datasets/me/cats/a.csv": Stored(b"plain"),
        "competitions/titanic/train.csv": Stored(b"1,2"),
        "models/google/gemma/pytorch/2b/1": Stored(tarred((member("w.bin"), b"old"))),
        "models/google/gemma/pytorch/2b/7": Stored(tarred((member("d/w.bin"), b"new"))),
    }
    assert files(brought("kaggle://datasets/me/cats/versions/2", "two")[0]) == {"a.txt": b"two"}
    assert files(brought("kaggle://datasets/me/cats/a.csv", "one")[0]) == {"a.csv": b"plain"}
    assert files(brought(f"{TITANIC}/train.csv", "one")[0])["train.csv"] == b"1,2"
    assert files(brought("kaggle://models/google/gemma/PyTorch/2b")[0]) == {"d/w.bin": b"new"}
    there, _ = brought("kaggle://models/google/gemma/pytorch/2b/1", "old", unpacked=False)
    assert list(files(there)) == ["gemma.tar.gz"]
    with pytest.raises(DataError, match=r"Kaggle knows no framework 'torch', but .*pytorch"):
        brought("kaggle://models/google/gemma/torch/2b")


def test_a_lost_connection_is_taken_up_where_it_was(kaggle: FakeKaggle) -> None:
    stored = Stored(zipped(x=NOISE), cut=[0, 1_200_000, 900_000])
    kaggle.files["datasets/me/cats"] = stored
    there, _ = brought("kaggle://datasets/me/cats")
    assert files(there) == {"x": NOISE}
    starts = [start for start, _ in stored.reads]
    # The first request of all only tells where the file is.
    assert starts == sorted(starts)
    assert starts[-1] > 1_000_000
    assert len(starts) == 4
    assert len(kaggle.asked) == 1


def test_what_was_cut_off_goes_on_in_the_next_call(
    kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(zipped(x=NOISE), cut=[0, 2_000_000, *[0] * 5])
    kaggle.files["datasets/me/cats"] = stored
    with pytest.raises(DataError, match=r"lost again and again .* have come; the same again"):
        brought("kaggle://datasets/me/cats")
    assert not files(Path("data/cats"))
    stored.cut.clear()
    stored.reads.clear()
    there, _ = brought("kaggle://datasets/me/cats")
    assert files(there) == {"x": NOISE}
    assert stored.reads[-1][0] == 2_000_000


def test_a_piece_of_an_older_file_is_dropped(kaggle: FakeKaggle) -> None:
    kaggle.files["datasets/me/cats"] = Stored(NOISE, cut=[0, 1_500_000, *[0] * 5])
    with pytest.raises(DataError):
        brought("kaggle://datasets/me/cats")
    fresh = zipped(x=NOISE[::-1])
    kaggle.files["datasets/me/cats"] = Stored(fresh)
    there, _ = brought("kaggle://datasets/me/cats")
    assert files(there) == {"x": NOISE[::-1]}


def test_damage_is_noticed(kaggle: FakeKaggle) -> None:
    wrong = base64.b64encode(bytes(16)).decode()
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"), md5=wrong)
    with pytest.raises(DataError, match="does not have the md5 that it should have"):
        brought("kaggle://datasets/me/cats")
    assert not Path("data/cats").exists()


def test_no_room(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(zipped(x=NOISE))
    kaggle.files["datasets/me/cats"] = stored
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4_000_000}))
    with pytest.raises(DataError, match=r"cats.zip needs 6.0 MB, and \S+ has 4.0 MB free"):
        brought("kaggle://datasets/me/cats")
    assert not Path("data/cats").exists()


def test_nothing_is_overwritten(kaggle: FakeKaggle) -> None:
    stored = Stored(zipped(**{"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"}))
    kaggle.files["datasets/me/cats"] = stored
    mine = Path("data/cats")
    mine.mkdir(parents=True)
    (mine / "a.txt").write_bytes(b"mine")
    (mine / "same.txt").write_bytes(b"same")
    with pytest.raises(DataError, match=r"other files of these names: a.txt. Nothing was over"):
        brought("kaggle://datasets/me/cats")
    assert files(mine) == {"a.txt": b"mine", "same.txt": b"same"}
    (mine / "a.txt").unlink()
    reads = len(stored.reads)
    brought("kaggle://datasets/me/cats")
    assert files(mine) == {"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"}
    assert sum(count for _, count in stored.reads[reads:]) <= len(stored.content)


def refuse_rules(kaggle: FakeKaggle) -> None:
    kaggle.rules.add("titanic")


def forbid(kaggle: FakeKaggle) -> None:
    kaggle.private.add("datasets/me/cats")


@pytest.mark.parametrize(
    ("source", "before", "words"),
    [
        (TITANIC, refuse_rules, "accept them at https://www.kaggle.com/competitions/titanic/rules"),
        ("kaggle://datasets/me/cats", forbid, "it is private. Look at https://www.kaggle.com/data"),
        ("kaggle://datasets/me/catz", None, r"no such thing \(404\): check the spelling at"),
    ],
)
def test_what_kaggle_refuses(
    kaggle: FakeKaggle, source: str, before: Callable[[FakeKaggle], None] | None, words: str
) -> None:
    kaggle.files["competitions/titanic"] = kaggle.files["datasets/me/cats"] = Stored(zipped(x=b""))
    if before is not None:
        before(kaggle)
    with pytest.raises(DataError, match=words) as caught:
        brought(source)
    assert kaggle.key not in str(caught.value)
    assert not Path("data").exists() or not os.listdir("data")


def test_wrong_credentials_and_none(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"))
    monkeypatch.setenv("KAGGLE_KEY", "an-older-key")
    with pytest.raises(DataError, match="does not know the credentials from KAGGLE_USERNAME and"):
        brought("kaggle://datasets/me/cats")
    monkeypatch.delenv("KAGGLE_USERNAME")
    monkeypatch.delenv("KAGGLE_KEY")
    with pytest.raises(DataError, match=r"no credentials were found: make a token at https"):
        brought("kaggle://datasets/me/cats")
    with pytest.raises(DataError, match="only who takes part gets a competition's data"):
        brought(TITANIC)
    kaggle.public = True
    assert brought("kaggle://datasets/me/cats")[1].endswith("(credentials: no credentials)")


def test_a_token_from_a_file_of_its_owner_only(
    kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=b"1"))
    kaggle.token, kaggle.login = "KGAT_t0ken", "nobody"
    monkeypatch.delenv("KAGGLE_USERNAME")
    monkeypatch.delenv("KAGGLE_KEY")
    path = tmp_path / "home/.kaggle/access_token"
    path.parent.mkdir()
    path.write_text("KGAT_t0ken\n")
    path.chmod(0o644)
    with pytest.raises(SetupError, match=rf"may read it \(mode 644\): `chmod 600 {path}`"):
        brought("kaggle://datasets/me/cats")
    path.chmod(0o600)
    assert brought("kaggle://datasets/me/cats")[1].endswith(f"(credentials: {path})")
    assert not kaggle.leaked


def test_a_login_through_the_browser(
    kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kaggle.files["competitions/titanic"] = Stored(zipped(x=b"1"))
    kaggle.token, kaggle.login = "of-the-browser", "nobody"
    monkeypatch.delenv("KAGGLE_USERNAME")
    monkeypatch.delenv("KAGGLE_KEY")
    path = tmp_path / "home/.kaggle/credentials.json"
    path.parent.mkdir()
    kept = {
        "refresh_token": "refresh",
        "access_token": kaggle.token,
        "access_token_expiration": "2999-01-01T00:00:00+00:00",
    }
    path.write_text(json.dumps(kept))
    path.chmod(0o600)
    _, said = brought(TITANIC)
    assert said.endswith(f"(credentials: {path})")
    assert not kaggle.leaked


def test_no_way_to_kaggle(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(DataError, match=r"localhost cannot be reached .*is this machine on"):
        brought(TITANIC)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    with pytest.raises(DataError, match=r"turn Internet on .* or add the data with «Add Input»"):
        brought(TITANIC)


@pytest.mark.parametrize(
    ("source", "mount"),
    [
        (TITANIC, "competitions/titanic"),
        (TITANIC, "titanic"),
        (f"{TITANIC}/train.csv", "competitions/titanic/train.csv"),
        ("kaggle://datasets/me/cats", "datasets/me/cats"),
        ("kaggle://datasets/me/cats", "cats"),
        ("kaggle://models/google/gemma/PyTorch/2b", "models/google/gemma/pytorch/2b/10"),
        ("kaggle://models/google/gemma/PyTorch/2b/9", "gemma/pytorch/2b/9"),
    ],
)
def test_inside_kaggle_what_is_mounted_is_used(
    source: str, mount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "input" / mount
    there.mkdir(parents=True)
    (there.parent / "9").mkdir(exist_ok=True)  # an older version of a model
    monkeypatch.setattr(of_kaggle, "INPUTS", tmp_path / "input")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found, said = brought(source)
    assert found == there
    assert said == f"{parse(source).url}: nothing to download" or "is mounted at" in said
    linked, said = brought(source, "deep/data")
    assert linked == Path("deep/data")
    assert linked.resolve() == there
    assert "deep/data is a link to it" in said
    brought(source, "deep/data")
    Path("mine").mkdir()
    with pytest.raises(DataError, match="mine is there already and is not a link to"):
        brought(source, "mine")
    assert not os.listdir("mine")


def test_outside_of_kaggle_the_folder_of_that_name_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input/competitions/titanic").mkdir(parents=True)
    monkeypatch.setattr(of_kaggle, "INPUTS", tmp_path / "input")
    with pytest.raises(DataError, match="no credentials for Kaggle were found"):
        brought(TITANIC)


def test_no_secret_is_said_or_kept(
    kaggle: FakeKaggle, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kaggle.files["datasets/me/cats"] = Stored(zipped(x=NOISE), cut=[0, 1000, *[0] * 5])
    with pytest.raises(DataError) as caught:
        brought("kaggle://datasets/me/cats")
    seen = str(caught.value) + "".join(capfd.readouterr())
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (kaggle.key, SECRET, "5ec2e7", kaggle.login.split()[1]):
        assert secret not in seen
        assert secret.encode() not in kept
    kaggle.files["datasets/me/cats"].cut.clear()
    _, said = brought("kaggle://datasets/me/cats")
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
    assert kaggle.key not in said
    assert kaggle.key.encode() not in kept
    assert b"5ec2e7" not in kept


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/data.md"
    [code] = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert capsys.readouterr().out == "['KAGGLE_API_ENVIRONMENT', 'http_proxy']\n"
