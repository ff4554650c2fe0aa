"""More of tests/notebook/capture/sources/test_jupyter.py, which takes longer."""

from __future__ import annotations

import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.kernel import PATIENCE
from tests.notebook.capture.fronts import LOAD, TRAIN, code, kernel, write, written
from tests.notebook.capture.sources.conftest import _busy_machine, folder
from tests.notebook.capture.sources.test_jupyter import PASSWORD, asking, client, server
from tpunb.notebook.capture.sources.base import LocatedNotebook
from tpunb.notebook.capture.sources.jupyter import from_server, from_session_name


@pytest.mark.usefixtures("starts_processes")
def test_the_path_of_the_session_right_after_a_rename(tmp_path: Path) -> None:
    with server(
        tmp_path, "--ServerApp.base_url=/user/me/", "--IdentityProvider.token=s3"
    ) as jupyter:
        (jupyter.folder / "sub").mkdir()
        write(jupyter.folder / "sub/one.ipynb", LOAD, TRAIN)
        path = {"path": "sub/one.ipynb", "name": "one.ipynb", "type": "notebook"}
        session = jupyter.ask("POST", "api/sessions", **path, kernel={"name": "python3"})
        with client(tmp_path, session["kernel"]["id"]) as made:
            made.execute(LOAD, reply=True, timeout=PATIENCE)
            patient = (
                f"from tpunb.notebook.capture.sources import jupyter; jupyter.WAIT = {PATIENCE}"
            )
            made.execute(patient, silent=True, reply=True, timeout=PATIENCE)
            made.execute(TRAIN, reply=True, timeout=PATIENCE)
            found = written(tmp_path)
            assert found["path"] == str(jupyter.folder / "sub/one.ipynb")
            assert found["origin"] == "the Jupyter server"

            # As a front end renames; another file takes the old name.
            jupyter.ask("PATCH", "api/contents/sub/one.ipynb", path="sub/ä two.ipynb")
            jupyter.ask("PATCH", f"api/sessions/{session['id']}", path="sub/ä two.ipynb")
            write(jupyter.folder / "sub/one.ipynb", "another = 1")
            made.execute(TRAIN, reply=True, timeout=PATIENCE)
            found = written(tmp_path)
            assert found["path"] == str(jupyter.folder / "sub/ä two.ipynb")
            assert found["name"] == "ä two"

            # A second notebook with the same kernel: the one whose cells run.
            write(jupyter.folder / "other.ipynb", "other = 1")
            shared = {"path": "other.ipynb", "name": "other.ipynb", "type": "notebook"}
            jupyter.ask("POST", "api/sessions", **shared, kernel={"id": session["kernel"]["id"]})
            made.execute(TRAIN, reply=True, timeout=PATIENCE)
            assert written(tmp_path)["path"] == str(jupyter.folder / "sub/ä two.ipynb")

            # A notebook that is run by a cell is another one, though it inherits the variable.
            write(jupyter.folder / "sub/inner.ipynb", code(LOAD), code(TRAIN))
            run = f"!{sys.executable} -m papermill --cwd . inner.ipynb o.ipynb"
            made.execute(run, reply=True, timeout=PATIENCE)
            found = written(tmp_path)
            assert found["path"] == str(jupyter.folder / "sub/inner.ipynb")
            api = "papermill.execute_notebook('inner.ipynb', 'o2.ipynb', progress_bar=False)"
            made.execute(f"import papermill\n{api}", reply=True, timeout=PATIENCE)
            assert written(tmp_path)["origin"] == "executed cells"
        jupyter.ask("DELETE", f"api/sessions/{session['id']}")


@pytest.mark.usefixtures("starts_processes")
def test_a_server_that_only_takes_a_password(tmp_path: Path) -> None:
    """What is known then is JPY_SESSION_NAME, and nothing is said."""
    path = write(tmp_path / "one.ipynb", LOAD, TRAIN)
    options = (
        "--IdentityProvider.token=",
        f"--PasswordIdentityProvider.hashed_password={PASSWORD}",
    )
    with server(tmp_path, *options) as jupyter:
        pid = jupyter.info["pid"]
        asking = kernel(JPY_PARENT_PID=str(pid), JPY_SESSION_NAME=str(path))
        asking = replace(asking, connection_file=str(tmp_path / "RUNTIME/kernel-1.json"))
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            jupyter.ask("GET", "api/sessions")
        caught.value.close()
        assert from_server(asking) is None
        assert from_session_name(asking) == LocatedNotebook("JPY_SESSION_NAME", path)
