from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpunb.places.config import (
    FILE,
    KINDS,
    GcloudMigSettings,
    GcloudTpuSettings,
    JobSetSettings,
    PlaceConfig,
    Settings,
    SshSettings,
    find_place,
)
from tpunb.places.errors import PlaceError

POD = '[places.pod]\nkind = "ssh"\nhosts = ["10.0.0.2", "me@10.0.0.3"]\n'

GKE = '[places.pod]\nkind = "jobset"\naccelerator = "v6e"\ntopology = "4x4"\nimage = "i"\n'

KAGGLE = '[places.pod]\nkind = "kaggle"\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    (folder / "project" / "notebooks").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return folder


def written(folder: Path, text: str) -> Path:
    file = folder / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            POD + 'files = ["*.py", "- old*"]\ncores = 2\n',
            SshSettings(hosts=("10.0.0.2", "me@10.0.0.3"), files=("*.py", "- old*"), cores=2),
        ),
        (
            '[places.pod]\nkind = "gcloud-tpu"\nname = "mine"\nzone = "us-west4-a"\n',
            GcloudTpuSettings(name="mine", zone="us-west4-a"),
        ),
        (
            '[places.pod]\nkind = "gcloud-mig"\nname = "g"\nzone = "us-c1-c"\ntunnel = true\n',
            GcloudMigSettings(name="g", zone="us-c1-c", tunnel=True),
        ),
        (
            GKE + 'queue = "team"\n',
            JobSetSettings(accelerator="v6e", topology="4x4", image="i", queue="team"),
        ),
    ],
)
def test_settings_of_a_place(home: Path, text: str, settings: Settings) -> None:
    file = written(home / "project", text)
    place = find_place("pod", home / "project")
    assert (place.name, place.file, place.settings) == ("pod", file, settings)
    assert PlaceConfig.from_json(place.to_json()) == place


def test_places_file_of_a_parent_folder_overrides_the_users_file(home: Path) -> None:
    user = written(home / ".config" / "tpunb", POD + POD.replace("pod", "own"))
    assert find_place("pod", home / "project" / "notebooks").file == user
    project = written(home / "project", POD)
    assert find_place("pod", home / "project" / "notebooks").file == project
    assert find_place("own", home / "project" / "notebooks").file == user


def test_places_file_search_ends_at_the_git_root(home: Path) -> None:
    written(home, POD)
    (home / "project" / ".git").mkdir()
    with pytest.raises(PlaceError, match=r"there is no places\.toml"):
        find_place("pod", home / "project")


def test_places_file_missing_error_shows_an_example(home: Path) -> None:
    with pytest.raises(PlaceError) as caught:
        find_place("pod", home / "project")
    example = str(caught.value).partition("Create one:\n")[2]
    written(home / "project", example)
    assert find_place("pod", home / "project").kind == "ssh"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_places_file_of_another_user_is_refused(home: Path) -> None:
    os.chown(written(home / "project", POD), 12345, 12345)
    with pytest.raises(PlaceError, match="belongs to another user"):
        find_place("pod", home / "project")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_link_to_an_own_file_sends_no_code_anywhere(home: Path) -> None:
    own = written(home / "own", POD)
    link = home / "project" / FILE
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(own)
    assert find_place("pod", home / "project").kind == "ssh"  # an own link
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(PlaceError, match="is a link of another user"):
        find_place("pod", home / "project")
    link.unlink()
    link.symlink_to(own)
    os.chown(own, 12345, 12345)
    with pytest.raises(PlaceError, match="another user's file"):
        find_place("pod", home / "project")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("[places.pod", "", "is not valid TOML"),
        ("[place.pod]\n", "place", "did you mean 'places'?"),
        ("places = 3\n", "places", "write [places.NAME]"),
        ("[places]\npod = 3\n", "places.pod", "write [places.pod]"),
        ("[places.pod]\n", "places.pod.kind", 'write kind = "ssh" or "gcloud-tpu"'),
        ('[places.pod]\nkind = "shh"\n', "places.pod.kind", "did you mean 'ssh'?"),
        ('[places.pod]\nkind = "ssh"\n', "places.pod.hosts", "write hosts = ["),
        (POD + "hots = []\n", "places.pod.hots", "did you mean 'hosts'?"),
        (POD.replace('["10.0.0.2", ', "[2, "), "places.pod.hosts", "write hosts = ["),
        (POD.replace("10.0.0.2", "-oProxyCommand=x"), "places.pod.hosts", "not a host name"),
        (POD.replace("me@10.0.0.3", "10.0.0.2"), "places.pod.hosts", "twice"),
        (POD + 'folder = "runs"\n', "places.pod.folder", 'write folder = "~/tpunb" or'),
        (POD + 'folder = "~me/runs"\n', "places.pod.folder", "is not an absolute path"),
        (POD + 'checkpoints = "~/c"\n', "places.pod.checkpoints", '"gs://bucket/run"'),
        (POD + 'cores = "4"\n', "places.pod.cores", "write cores = 4"),
        (POD + 'environment = "mak"\n', "places.pod.environment", '"check" or "make"'),
        ('[places.pod]\nkind = "gcloud-tpu"\nname = "a"\n', "places.pod.zone", "write zone ="),
        (GKE.replace("topology", "topolgy"), "places.pod.topolgy", "did you mean 'topology'?"),
        (GKE.replace("image", "#"), "places.pod.image", "write image ="),
        (GKE.replace("4x4", "4x5"), "places.pod.topology", "v6e has 1x1, 2x2"),
        (GKE.replace("v6e", "v6"), "places.pod.accelerator", "did you mean 'v6e'?"),
        (GKE + 'python = "python3"\n', "places.pod.python", '(keys of kind "jobset":'),
        (GKE + 'queue = "My queue"\n', "places.pod.queue", "lower-case letters"),
        (GKE + "chips_per_host = 8\n", "places.pod.chips_per_host", "have 4 chips"),
        (GKE.replace('"i"', '"a b"'), "places.pod.image", "must not contain spaces"),
        (KAGGLE + "session_hours = 0\n", "places.pod.session_hours", "at least 0.1"),
    ],
)
def test_places_file_errors_name_file_and_key(home: Path, text: str, key: str, says: str) -> None:
    file = written(home / "project", text)
    with pytest.raises(PlaceError) as caught:
        find_place("pod", home / "project")
    assert caught.value.file == file
    assert caught.value.key == key
    assert str(file) in str(caught.value)
    assert says in str(caught.value)


def test_unknown_place_name_suggests_a_similar_one(home: Path) -> None:
    written(home / "project", POD)
    with pytest.raises(PlaceError, match="did you mean 'pod'"):
        find_place("pods", home / "project")


def test_required_settings_are_listed_for_every_kind_of_place() -> None:
    from tpunb.places import config

    assert config._NEEDED.keys() == KINDS.keys()
