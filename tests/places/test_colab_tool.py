from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.fakes import colab
from tests.fakes.colab import OPTIONS, TOKEN, FakeColab
from tpunb.places.colab_tool import ColabError, ColabTool, Session, Usage, last_words
from tpunb.places.place import Cancelled


@pytest.fixture
def account(starts_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeColab:
    made = colab.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return made


def test_colab_tool_lists_sessions_and_usage(account: FakeColab) -> None:
    tool = ColabTool()
    assert tool.sessions() == []
    tool.new("mine", "v5e1")
    tool.new("other", "cpu")
    assert tool.sessions() == [
        Session("mine", "m-s-mine", "V5E1"),
        Session("other", "m-s-other", "CPU"),
    ]
    assert tool.usage() == Usage(83.2, 1.84)
    assert tool.version() == "Version: 0.7.5"
    for name in ("mine", "other", "never-there"):
        tool.stop(name)
    assert account.sessions == {}
    assert ColabTool("adc").command("usage") == ["colab", "--auth", "adc", "usage"]


def test_colab_tool_output_in_an_unknown_form_is_an_error(
    account: FakeColab, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = ColabTool()
    monkeypatch.setattr(tool, "run", lambda *words, timeout: "[mine] m-s-mine | TPU: V5E1 | x\n")
    with pytest.raises(ColabError, match="tpunb cannot read the output of `colab sessions`"):
        tool.sessions()


def test_colab_tool_uploads_without_a_local_file(account: FakeColab, tmp_path: Path) -> None:
    tool = ColabTool()
    tool.new("mine", "cpu")
    secret = bytes(range(256)) * 5000
    tool.upload("mine", secret, "data")
    assert (account.content("mine") / "data").read_bytes() == secret
    (call,) = (words for words in account.calls if words[0] == "upload")
    assert call[3].startswith("/proc/self/fd/")
    tool.download("mine", "data", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == secret


def test_colab_tool_errors_show_the_last_line_without_credentials(account: FakeColab) -> None:
    tool = ColabTool()
    tool.new("mine", "cpu")
    account.fail(upload=503)
    with pytest.raises(ColabError) as failed:
        tool.upload("mine", b"", "data")
    assert str(failed.value) == (
        "`colab upload` failed: Upload failed: 503 Server Error: Service Unavailable for url: "
        "https://8080-m-s.us.prod.colab.dev/api/contents/content/data"
    )
    assert TOKEN not in repr(failed.value.args)
    account.fail(login=True)
    with pytest.raises(ColabError) as failed:
        tool.sessions()
    assert str(failed.value) == (
        "`colab sessions` failed: Aborted. Run `colab sessions` in a terminal to log in, or to see "
        "the problem"
    )
    with pytest.raises(ColabError) as failed:
        tool.stop("mine")
    assert str(failed.value) == "`colab stop` failed: Aborted"  # without a full stop of its own
    assert tool.usage() is None
    assert last_words("") == ""


@pytest.mark.usefixtures("starts_processes")
def test_colab_tool_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ColabError, match="`colab` is not installed: `uv tool install google-co"):
        ColabTool().sessions()


def test_colab_tool_timeout_and_cancellation(account: FakeColab) -> None:
    account.fail(new=60)
    with pytest.raises(ColabError, match=r"`colab new` has not answered in 0\.5 s"):
        ColabTool().run("new", "-s", "mine", timeout=0.5)
    with pytest.raises(Cancelled):
        ColabTool().run("new", "-s", "mine", timeout=60, cancelled=lambda: True)


@pytest.mark.skipif(
    importlib.util.find_spec("colab_cli") is None, reason="google-colab-cli is not installed"
)
def test_fake_colab_has_the_options_of_the_real_tool() -> None:
    typer = pytest.importorskip("typer")
    cli = pytest.importorskip("colab_cli.cli")
    group = typer.main.get_command(cli.app)
    commands = {"": group, **group.commands}
    assert {name: _options(command) for name, command in commands.items()} == OPTIONS


def _options(command: object) -> list[str]:
    left_out = ("install_completion", "show_completion", "help")
    found = []
    for each in command.params:  # type: ignore[attr-defined]
        if each.name in left_out:
            continue
        if each.param_type_name == "argument":
            found.append(("" if each.required else "?") + each.name)
        else:
            found.append("/".join(each.opts) + "=" * (not getattr(each, "is_flag", False)))
    return found


def test_fake_colab_refuses_unknown_options(account: FakeColab) -> None:
    for words in (["new", "--tup", "v5e1"], ["nothing"], ["upload", "-s", "a", "b"]):
        tried = subprocess.run([account.folder / "colab", *words], capture_output=True, text=True)
        assert tried.returncode == 2, json.dumps(words)
