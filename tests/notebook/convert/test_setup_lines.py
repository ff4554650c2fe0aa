"""Setup lines as Python, in as many lines as they had."""

from __future__ import annotations

import ast

import pytest

from tpunb.notebook.convert.cells import PlainCell, plain_python
from tpunb.notebook.convert.magics import NotPythonError


def converted(source: str) -> PlainCell:
    cell = plain_python(source, secrets={}, setup=True)
    assert len(cell.lines) == len(source.split("\n"))
    ast.parse("\n".join(cell.lines))
    return cell


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("!pip install -q torch", "_tpunb_setup_install('pip install -q torch')"),
        ("!cd x && pip install -e .", "_tpunb_setup_install('cd x && pip install -e .')"),
        ("%pip install torch", "_tpunb_setup_install('pip install torch')"),
        ("%conda install -c x y", "_tpunb_setup_install('conda install --yes -c x y')"),
        ("%uv pip install x", "_tpunb_setup_install('python -m uv pip install x')"),
        ("!apt-get install -y x", "_tpunb_setup_shell('apt-get install -y x')"),
        ("%mkdir -p a", "_tpunb_setup_shell('mkdir -p a')"),
        ("%cd repo", "_tpunb_setup_cd('repo')"),
        ("%cd -q 'my repo'", "_tpunb_setup_cd('my repo')"),
        ("%cd -", "_tpunb_setup_cd('-')"),
        ("%env A=b c", "os.environ['A'] = 'b c'"),
        ("%set_env A b", "os.environ['A'] = 'b'"),
        ("%env A=$b", "os.environ['A'] = _tpunb_setup_values('$b', lambda: str(b))"),
        (
            "%env A_TOKEN=abc",
            "os.environ['A_TOKEN'] = _tpunb_setup_secret('A_TOKEN', plain=True)",
        ),
        ("x = !ls", "x = _tpunb_setup_output('ls')"),
        (
            "!ls {n+1}",
            "_tpunb_setup_shell(_tpunb_setup_values('ls {n+1}', lambda: 'ls ' + str((n+1))))",
        ),
        (
            "!x --token abc -v",
            "_tpunb_setup_shell('x --token ' + _tpunb_setup_secret('TOKEN') + ' -v')",
        ),
        (
            "!curl -H 'Cookie: abc' u",
            "_tpunb_setup_shell(\"curl -H 'Cookie: '\" + _tpunb_setup_secret('COOKIE') + \"'' u\")",
        ),
        ("get_ipython().system('ls')", "_tpunb_setup_shell('ls')"),
    ],
)  # fmt: skip
def test_a_line(line: str, code: str) -> None:
    assert converted(line).lines == (code,)


@pytest.mark.parametrize("line", ["%env", "%env HOME", "%ll", "%cd -b mark", "%dhist"])
def test_what_only_shows_something_is_left_out(line: str) -> None:
    cell = converted(line)
    assert cell.lines == (f"# left out (of use in a notebook only): {line}",)


@pytest.mark.parametrize(
    ("magic", "call"),
    [
        ("%%bash", "_tpunb_setup_shell(['bash'], must=True, text="),
        ("%%sh -e", "_tpunb_setup_shell(['sh', '-e'], must=True, text="),
        ("%%script perl -w", "_tpunb_setup_shell(['perl', '-w'], must=True, text="),
        ("%%bash --out o", "o = _tpunb_setup_shell(['bash'], keep='out', must=True, text="),
        (
            "%%bash --out o --err e",
            "o, e = _tpunb_setup_shell(['bash'], keep='out err', must=True, text=",
        ),
        ("%%writefile a b.py", "_tpunb_setup_file('a b.py', 'w', "),
        ("%%writefile -a m.py", "_tpunb_setup_file('m.py', 'a', "),
        ("%%file ~/m.py", "_tpunb_setup_file('~/m.py', 'w', "),
    ],
)
def test_a_cell_magic_keeps_its_text_as_lines(magic: str, call: str) -> None:
    cell = converted(f"{magic}\nfirst\n  second")
    end = {"o = ": ")[0]"}.get(call[:4], ")")
    assert cell.lines == (f"{call}r'''", "first", f"  second'''[1:] + '\\n'{end}")


BODIES = [
    "a",
    "a\n",
    "'''\n\"\"\"",
    "ends with '",
    "ends with \\",
    "%%time\n# %% cell",
    "tab\tü \x0c \x00",
    "export A_TOKEN=abc\n",
]


@pytest.mark.parametrize("body", BODIES)
def test_any_text_arrives_as_it_was(body: str) -> None:
    cell = converted(f"%%writefile m.py\n{body}")
    written: list[str] = []

    def write(_path: str, _mode: str, text: str) -> None:
        written.append(text)

    names = {"_tpunb_setup_file": write, "_tpunb_setup_secret": lambda name, plain: "abc"}
    exec(compile("\n".join(cell.lines), "cell", "exec"), names)
    assert written == [body if body.endswith("\n") else f"{body}\n"]


@pytest.mark.parametrize("setup", [False, True])
def test_secrets_are_not_written_into_comments(setup: bool) -> None:
    source = "%foo --token abc\n!x \\\n  --token abc\n%env A_TOKEN=abc"
    assert "abc" not in "\n".join(plain_python(source, False, {}, setup).lines)


def test_what_runs_in_the_background_is_left_out() -> None:
    cell = converted("%%bash --bg\nserve")
    assert cell.lines == ("# left out (of use in a notebook only): %%bash --bg", "# | serve")


def test_a_private_key_is_refused_and_not_written_into_comments() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\ngeheim\n-----END RSA PRIVATE KEY-----"
    with pytest.raises(
        NotPythonError, match=r"no private key\. Or tag the cell tpu-skip"
    ) as raised:
        plain_python(f"%%writefile key.pem\n{key}\nend", secrets={})
    assert raised.value.line == 2
    assert plain_python(f"%%writefile key.pem\n{key}\nend").lines[1:] == (*["# | …"] * 3, "# | end")
