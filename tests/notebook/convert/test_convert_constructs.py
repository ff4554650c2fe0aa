"""What notebooks hold that scripts may not: each construct is converted, and the script run.

Those that leave something in the kernel are in `test_convert_same_as_kernel.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.notebook.convert.notebooks import lines_of, notebook, run
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert


class Case(NamedTuple):
    name: str
    source: str
    train: str
    """Runs below the construct."""
    output: str
    """What the script writes."""
    left_out: tuple[str, ...] = ()
    """The beginnings of what does not run."""


CASES = [
    # Magics whose code is kept
    Case("%time without code", "%time\nx = 1", "print(x)", "1", ("%time",)),
    Case("%time with its option", "%time --no-raise-error x = 'a  b'", "print(x)", "a  b"),
    Case("%%time with comments", "\n# note\n%%time\n# note\nx = 3", "print(x)", "3"),
    Case("%%timeit with a setup and no names", "%%timeit print(1)\nprint(2)", "", "1\n2"),
    Case(
        "%%timeit keeps names",
        "%%timeit\n# a\nx = '''a\n  b\n'''; import os\n!ls\nif x:\n    y = 1\n\n    print(x, y)",
        "print({'x', 'y', 'os'} & {*globals()})",
        "a\n  b\n 1\nset()",
        ("!ls",),
    ),
    Case("%%time, indented", "%%time\n    x = 3\n    y = 4", "print(x, y)", "3 4"),
    # Magics that are left out
    Case("%matplotlib", "%matplotlib inline\nx = 1", "print(x)", "1", ("%matplotlib inline",)),
    Case("%load_ext", "%load_ext tpunb\n%autoreload 2", "", "", ("%load_ext", "%autoreload")),
    Case("%pip", "%pip install x\n%conda install y", "", "", ("%pip", "%conda")),
    Case("%env", "%env A=b", "", "", ("%env A=b",)),
    Case("an unknown magic", "%nosuch a b\nx = 1", "print(x)", "1", ("%nosuch a b",)),
    Case("an unknown cell magic", "%%nosuch\nx ! 1\n\ny", "", "", ("%%nosuch …",)),
    Case("help", "int?\nint??\n?int\nx = 1", "print(x)", "1", ("int?", "int??", "?int")),
    Case("help of a magic", "%%time?", "", "", ("%%time?",)),
    Case(
        "%%writefile",
        "%%writefile nope.py\nx = (",
        "import os; print(os.listdir())",
        "['made']",
        ("%%writefile",),
    ),
    Case(
        "%aimport", "%aimport os, json\n%aimport -re", "print(json.dumps(1))", "1", ("%aimport -",)
    ),
    Case("%load", "# %load other.py\nx = 1\n%load y.py", "print(x)", "1", ("%load y.py",)),
    Case("a name that is not needed", "%%capture out\nx = 1", "print(x)", "1"),
    # Shell
    Case("!cmd", "!echo no\n!echo \\\n  no\nx = 1", "print(x)", "1", ("!echo no", "!echo \\ …")),
    Case(
        "!cmd that is no Python at all",
        "!echo it's (\nx = 1\n!echo \\'''\ny = 2",
        "print(x, y)",
        "1 2",
        ("!echo it's", "!echo"),
    ),
    Case("!!cmd", "!!echo no", "", "", ("!!echo no",)),
    Case("%%bash", "%%bash\necho no\nif [ a ]; then b; fi", "", "", ("%%bash …",)),
    Case("%%!", "%%!\necho no", "", "", ("%%! …",)),
    Case("x = !cmd", "x = !printf 'a\\nb c\\n'", "print(x)", "['a', 'b c']"),
    Case(
        "x = !cmd, as IPython's list",
        "x = !printf 'a b\\nc'",
        "import pickle\nprint(x.s, x.grep('c'), type(pickle.loads(pickle.dumps(x))).__name__)",
        "a b c ['c'] SList",
    ),
    Case("x = !cmd, continued", "x = !echo a \\\n  b\ny = 1", "print(x, y)", "['a b'] 1"),
    Case("x = !cmd in a chain is not special", "x = ['= !a']\ny = '= %b'", "print(x)", "['= !a']"),
    # Blocks and other places
    Case(
        "in a block alone",
        "if True:\n    !false\nelse:\n    %env A=b\nx = 1",
        "print(x)",
        "1",
        ("!false", "%env A=b"),
    ),
    Case(
        "in a block with others",
        "for i in [1, 2]:\n    %time x = i\n    !false\n    print(x)",
        "",
        "1\n2",
        ("!false",),
    ),
    Case(
        "in a function",
        "def f():\n    'doc'\n    !echo {x}; false\n    return _exit_code\nx = 7",
        "print(f(), _exit_code)",
        "7\n1 1",
    ),
    Case("automagic", "# needed\npip install x -q", "", "", ("%pip install x -q",)),
    Case("automagic that reads as Python", "ls -la", "", "", ("%ls -la",)),
    Case("names of magics that are names", "env = 1; ls = [env]", "print(ls)", "[1]"),
    Case("several lines are not automagic", "cd = 1\ncd\n", "print(cd)", "1"),
    Case("IPython's prompts", "In [3]: x = 1\n   ...: y = 2", "print(x, y)", "1 2"),
    Case("carriage returns", "x = 1\r\ny = 2\r\n", "print(x, y)", "1 2"),
    Case("a form feed", "x = 1\n\x0cy = '\x0c'", "print(x, len(y))", "1 1"),
    # What Python itself minds
    Case(
        "from __future__",
        "import os\nfrom __future__ import annotations\ndef f(x: Nope): ...",
        "print(f.__annotations__)",
        "{'x': 'Nope'}",
    ),
    Case(
        "from __future__, long",
        "x = 1; from __future__ import (\n  annotations,\n); y = 'ä'",
        "print(x, y)",
        "1 ä",
    ),
    Case(
        "global at top level",
        "x = 1\nif x: global x\nif x:\n    global x",
        "global x; print(x)",
        "1",
    ),
    Case("global in a class", "x = 1\nclass A:\n    global x\n    x = 2", "print(x)", "2"),
    Case("a coding line", "# -*- coding: latin-1 -*-\nx = 'ä'", "print(x)", "ä"),
    Case("warnings of the compiler", "x = '\\d'\ny = x is '\\d'", "print(x)", "\\d"),
    Case("__main__", "if __name__ == '__main__':\n    x = 1", "print(x)", "1"),
    # What a notebook has without an import
    Case(
        "display, imported further down",
        "def show(x): display(x)\nshow('shown')",
        "from IPython.display import display\ndisplay('again')",
        "shown\nagain",
    ),
    Case("a display of one's own", "def display(x):\n    print('own', x)", "display(1)", "own 1"),
    Case("get_ipython", "x = 'google.colab' in str(get_ipython())", "print(x)", "False"),
    Case(
        "get_ipython in a function",
        "def f(x):\n    get_ipython().system('false')\n"
        "    ip = get_ipython()\n    return ip.getoutput('echo ' + x) + [_exit_code]",
        "print(f('1'))",
        "['1', 1]",
    ),
    Case(
        "get_ipython().magic and an assigned shell",
        "ip = get_ipython()\nif ip:\n    ip.magic('load_ext autoreload')\nip.system('false')",
        "print(1)",
        "1",
        ("ip.magic", "ip.system"),
    ),
    Case(
        "get_ipython().run_cell_magic",
        "get_ipython().run_cell_magic('bash', '',\n  'ls\\n')\nx = 1",
        "print(x)",
        "1",
        ("get_ipython().run_cell_magic",),
    ),
    Case("the shell's class", "x = get_ipython().__class__.__name__", "print(x)", "NoneType"),
    Case("input in a function", "def ask():\n    return input()", "print(1)", "1"),
    Case("input of one's own", "def input(x):\n    return x", "y = input(4)\nprint(y)", "4"),
    # What talks to the front end, or to the person
    Case(
        "drive.mount on one line",
        "from google.colab import drive; drive.mount('/content/drive'); x = 1",
        "print(x)",
        "1",
        ("from google.colab import drive", "drive.mount"),
    ),
    Case(
        "google.colab in a block",
        "import sys\nif 'google.colab' in sys.modules:\n    from google.colab import files as f\n"
        "    f.upload()\nx = 1",
        "print(x)",
        "1",
        ("from google.colab import files as f", "f.upload()"),
    ),
    Case(
        "google.colab that is tried",
        "try:\n    import google.colab\n    IN_COLAB = True\nexcept ImportError:\n"
        "    IN_COLAB = False",
        "print(IN_COLAB)",
        "False",
    ),
    Case(
        "a secret in the environment",
        "import os\nfrom google.colab import userdata\nfrom getpass import getpass\n"
        "os.environ['A'] = userdata.get('A')\nos.environ['B'] = getpass()\n"
        "os.environ['C'] = input('C?')",
        "print(os.environ.get('A'))",
        "None",
        ("from google.colab import userdata", "os.environ['A']", "os.environ['B']", "os.environ"),
    ),
    Case(
        "an authentication",
        "from google.colab import auth\nauth.authenticate_user()\nx = 1",
        "print(x)",
        "1",
        ("from google.colab import auth", "auth.authenticate_user()"),
    ),
    Case(
        "folders that the notebook went to",
        "import os\nos.mkdir('data')\nos.chdir('data')\nfirst = os.path.basename(os.getcwd())\n"
        "%pushd /\nsecond = os.getcwd()\n%popd",
        "print(first, second, os.path.basename(os.getcwd()))",
        "data / data",
    ),
    Case("forms", "#@title A form\nx = 3 #@param {type: 'integer'}", "print(x)", "3"),
    Case("nbdev", "#| default_exp core\n#| export\n#|hide\n#hide\nx = 1", "print(x)", "1"),
    # Waiting
    Case(
        "await",
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\n"
        "a, b = await asyncio.gather(f(1), f('ä'))",
        "c = 'é', await (f(\n  await asyncio.create_task(f(3)))), [await f(i) for i in (4, 5)]\n"
        "if c: print(a, b, c)",
        "1 ä ('é', 3, [4, 5])",
    ),
    Case(
        "a task",
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\n"
        "t = asyncio.create_task(f('é')); u = [asyncio.ensure_future(f(i)) for i in (1, 2)]\n"
        "async def g():\n    return await asyncio.create_task(f(3))\n"
        "v = asyncio.gather(\n  f(4), f(await f(5)))",
        "print(await t, [await a for a in u], await g(), await v)\n"
        "print(await asyncio.gather(asyncio.create_task(f(4))))",
        "é [1, 2] 3 [4, 5]\n[4]",
    ),
    # Cells that are left out
    Case("# tpu: skip", "# tpu: skip\nprint(1)\nnot python", "", "", ("# tpu: skip",)),
    Case("%%tpu_debug", "%%tpu_debug --no-report\nprint(1)", "", "", ("%%tpu_debug",)),
    Case("raw", "raw: this is ( not python", "print(1)", "1"),
    Case("markdown", 'markdown: # Title\n```python\nx = (\n```\n%% x\n"""\0', "print(1)", "1"),
]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_construct(case: Case, tmp_path: Path) -> None:
    snapshot = notebook(case.source, f"%%tpu_train --cores 2\n{case.train}")
    script = convert(snapshot)
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (f"{case.output}\n" if case.output else "")
    assert [omission.cell for omission in script.omissions] == [1] * len(case.left_out)
    for omission, text in zip(script.omissions, case.left_out, strict=True):
        assert omission.text.startswith(text)
        assert omission.reason
        line = snapshot.cells[0].source.replace("\r\n", "\n").split("\n")[omission.line - 1]
        assert text.removesuffix(" …").lstrip("%") in line
    for block in script.blocks[1:]:
        assert block.cell is not None
        source = snapshot.cells[block.cell].source.replace("\r\n", "\n")
        ends = block.role == "prelude" and "%%tpu_train" in source  # with a line of its own
        assert block.last - block.first + 1 == len(source.split("\n")) + ends


REFUSED = {
    "invalid syntax": ("x = 1\ny = = 2", 2, "invalid syntax", "y = = 2"),
    "a bracket": ("x = (1,\ny = 2", 1, r"it is not Python: .*\(|was never closed", "x = (1,"),
    "await in a plain function": (
        "def f():\n    await x",
        2,
        "it is not Python: 'await' outside async function",
        "    await x",
    ),
    "a bare shell cell": (
        "gcloud compute tpus ssh x \\\n  --zone y",
        1,
        "begin shell commands with !; or tag the cell tpu-skip",
        "gcloud",
    ),
    "return": ("x = 1\nreturn x", 2, "'return' outside function", "return x"),
    "await that names": ("import a\nawait (b := a.c())", 2, "async def f", "await (b :="),
    "async for": ("async for x in y:\n    pass", 1, "async def f.*tpu-skip", "async for x in y:"),
    "an unknown feature": ("from __future__ import nope", 1, "nope is not defined", "from __"),
    "a null character": ("x = '\0'", None, "null", ""),
    "a lone surrogate": ("x = '\ud800'", None, "surrogates", ""),
    "%run": ("x = 1\n%run other.ipynb", 2, "does not exist in.*tpu-skip", "_tpunb_run_notebook("),
    "%pylab": ("%pylab inline", 1, "write the imports", "%pylab inline"),
    "x = %who_ls": ("x = %who_ls", 1, "`%who_ls` has no value in a script", "x = %who_ls"),
    "input for a name": ("x = 1\nname = input('?')", 2, "cannot ask the user", "name = input('?')"),
    "a secret": (
        "from google.colab import userdata\nlogin(userdata.get('A'))",
        2,
        r"userdata.get\(\) cannot ask the user in a run: .*os.environ",
        "login(userdata",
    ),
    "code in a text": (
        "get_ipython().run_cell_magic('time', '', 'x = 1')",
        1,
        "begins with %%time",
        "get_ipython()",
    ),
    "get_ipython()": (
        "get_ipython().set_next_input('x')",
        1,
        r"get_ipython\(\)\.set_next_input needs a notebook.*tpu-skip",
        "get_ipython().set_next_input('x')",
    ),
}


@pytest.mark.parametrize(("source", "line", "words", "shown"), REFUSED.values(), ids=REFUSED)
def test_refused_with_cell_line_and_words(
    source: str, line: int | None, words: str, shown: str
) -> None:
    with pytest.raises(ConversionError, match=words) as caught:
        convert(notebook("a = 1", "markdown: text", source, "%%tpu_train\nb = 2"))
    assert (caught.value.cell, caught.value.line) == (2, line)
    assert caught.value.source.startswith(shown)


def test_lines_that_are_left_out_are_comments_where_they_may_be() -> None:
    source = "if x:\n    !ls\n    y = 1\nif x:\n    !ls\n!ls \\\n  -la"
    script = convert(notebook(source, train=None))
    why = "left out (shell commands run once, in the notebook)"
    assert lines_of(script, 0) == [
        "if x:",
        f"    # {why}: !ls",
        "    y = 1",
        "if x:",
        f"    pass  # {why}: !ls",
        f"# {why}: !ls \\",
        "# |   -la",
    ]
