from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpunb.places.config import (
    FILE,
    GcloudSettings,
    JobSetSettings,
    PlaceConfig,
    Settings,
    SshSettings,
    find_hosts_place,
    find_place,
)
from tpunb.places.errors import PlaceError

POD = '[places.pod]\nkind = "ssh"\nhosts = ["10.0.0.2", "me@10.0.0.3"]\n'

GKE = '[places.pod]\nkind = "jobset"\naccelerator = "v6e"\ntopology = "4x4"\nimage = "i"\n'


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
            '[places.pod]\nkind = "gcloud-mig"\nname = "g"\nzone = "us-c1-c"\ntunnel = true\n',
            GcloudSettings(name="g", zone="us-c1-c", tunnel=True),
        ),
        (
            GKE + 'queue = "team"\nchips_per_host = 8\n',
            JobSetSettings(
                accelerator="v6e", topology="4x4", image="i", queue="team", chips_per_host=8
            ),
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


def test_places_file_search_ends_at_the_git_root_with_an_example(home: Path) -> None:
    written(home, POD)
    (home / "project" / ".git").mkdir()
    with pytest.raises(PlaceError, match=r"there is no places\.toml") as caught:
        find_place("pod", home / "project")
    written(home / "project", str(caught.value).partition("Create one:\n")[2])
    assert find_place("pod", home / "project").kind == "ssh"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_places_file_and_link_of_another_user_send_no_code_anywhere(home: Path) -> None:
    own = written(home / "own", POD)
    link = home / "project" / FILE
    link.symlink_to(own)
    assert find_place("pod", home / "project").kind == "ssh"  # an own link
    for other in (link, own):
        os.chown(other, 12345, 12345, follow_symlinks=False)
        with pytest.raises(PlaceError, match="another user's file"):
            find_place("pod", home / "project")
        os.chown(other, 0, 0, follow_symlinks=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[places.pod", "is not valid TOML"),
        ("[place.pod]\n", "only [places.NAME] tables"),
        ("places = 3\n", "only [places.NAME] tables"),
        ("[places]\npod = 3\n", "places.pod: write [places.pod]"),
        ('[places.pod]\nkind = "shh"\n', 'kind = "ssh" or "gcloud-tpu"'),
        ('[places.pod]\nkind = "ssh"\n', "places.pod.hosts is missing: a list of texts"),
        (POD + "hots = []\n", 'places.pod.hots is unknown (keys of kind "ssh": checkpoints, '),
        (
            POD.replace('["10.0.0.2", ', "[2, "),
            "'me@10.0.0.3']: write a list of texts",
        ),
        (
            POD.replace("10.0.0.2", "-oProxyCommand=x"),
            "hosts = '-oProxyCommand=x': write [USER@]",
        ),
        (POD + 'folder = "~me/runs"\n', "places.pod.folder = '~me/runs': write an absolute path"),
        (
            POD + 'checkpoints = "~/c"\n',
            "checkpoints = '~/c': write an absolute path or a URL",
        ),
        (POD + 'cores = "4"\n', "places.pod.cores = '4': write a number"),
        ('[places.pod]\nkind = "gcloud-tpu"\nname = "a"\n', "places.pod.zone is missing: a text"),
        (GKE.replace("4x4", "4*4"), "places.pod.topology = '4*4': write chips along each side"),
        (GKE.replace("v6e", "v6"), "places.pod.accelerator = 'v6': write \"v5e\" or"),
        (GKE + "chips_per_host = 5\n", "places.pod.chips_per_host = 5: write 1, 4 or 8"),
        (POD.replace("pod", "pods"), "no place is named 'pod' (places: pods)"),
    ],
)
def test_places_file_errors_name_file_and_key(home: Path, text: str, says: str) -> None:
    file = written(home / "project", text)
    with pytest.raises(PlaceError) as caught:
        find_place("pod", home / "project")
    assert str(file) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GKE, "`tpunb submit NB.ipynb --on pod --manifest > run.yaml`"),
        ('[places.pod]\nkind = "kaggle"\n', "`tpunb submit NB.ipynb --on pod`"),
    ],
)
def test_place_without_hosts_says_how_to_use_it(home: Path, text: str, says: str) -> None:
    written(home / "project", text)
    with pytest.raises(PlaceError) as caught:
        find_hosts_place("pod", home / "project")
    assert says in str(caught.value)
