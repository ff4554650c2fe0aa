"""Random notebooks with magics: a script runs the same statements in the same order as IPython."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbformat import v4

from tests.notebook.convert.notebooks import lines_of, notebook, run
from tests.notebook.convert.shell import Shell
from tests.support import examples
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.syntax import interpolated
from tpunb.notebook.models import Export

START = """\
trace = []
async def later(n):
    trace.append(("later", n))
    return n"""
NAMES = ("trace", "v", "w", "s", "i", "text", "brought", "shared")
END = (
    "import json\n"
    f"found = {{name: globals().get(name) for name in {NAMES}}}\n"
    "print(json.dumps(found, default=repr))"
)

PIECES = [
    "trace.append({n})",
    "(trace\n .append({n}))",
    "v = {n}",
    "v = {n}; trace.append(v)",
    "%time trace.append({n})",
    "%time v = {n}",
    "v = %time {n} + 1",
    "%timeit -n1 -r1 trace.append({n})",
    "v = w = 1\n%timeit -n1 -r1 v = {n}; trace.append(v)\n"
    "%timeit -n1 -r1 for w in [{n}]: trace.append(w)\ntrace.append([v, w])",
    "%prun -q trace.append({n})",
    "!echo {n}",
    '!echo "it\'s ( {n}"',
    "!echo a \\\n  b",
    "%sx echo {n}",
    "v = !printf '{n}\\n{n}'\nv = list(v)",
    "w = {n}\nv = !echo {{w + 1}} $w\ntrace.append(v[0])",
    "s = !printf 'a b{n}\\nc 1{n}\\nm.py\\n'\n"
    "v = s.n, s.s, s.nlstr, s.spstr, list(s.l), list(s.list)\n"
    "trace.append([v, s.grep('A').s, list(s.fields(1)), s.fields(), s.fields(-1, 0).n])\n"
    "trace.append([[str(p) for p in s.p], list(s.sort(1, nums=True)), list(s.sort())])\n"
    "trace.append([list(s.grep('b', prune=True, field=1)), list(s.sort(0)), list(s[:1])])\n"
    "s = list(s)",
    "v = %env HOME",
    "v = %env\nv = v['HOME']",
    "v = %pwd",
    "%env TRACE={n}",
    "%cd .",
    "%precision 3",
    "int?",
    "%time?",
    "?int",
    ",trace.append {n}",
    "/trace.append {n}",
    "%load_ext autoreload\n%aimport json\ntrace.append(json.dumps({n}))",
    "if {n} % 2:\n    !true\n    trace.append({n})\nelse:\n    %pwd",
    "for i in range(2):\n    %time trace.append(({n}, i))\n    !true",
    "def f():\n    !true\n    v = !echo {n}\n    trace.append(v[0])\nf()",
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    !true\nfinally:\n    trace.append({n})",
    "with open('m.py') as file:\n    %time trace.append({n})",
    "class A:\n    trace.append({n})\n    %pwd\n    v = {n}",
    "s = '''\n%time trace.append(0)\n!ls {n}\n'''",
    "# %time trace.append(0)\n#!ls",
    "v = [{n},\n     4 \\\n%3]",
    "text = 'ä€'; trace.append({n}) # é",
    "for _ in range({n}): trace.append(_)",
    "_ = {n}",
    "global v\nv = {n}",
    "from __future__ import annotations\ntrace.append({n})",
    "trace.append(await later({n}))",
    "import asyncio\nv = asyncio.create_task(later({n}))\nv = await v",
    "v = [await later(i) for i in ({n}, 1)]",
    "v = await later(\n  await later({n}))",
    "get_ipython().run_line_magic('time', 'trace.append({n})')",
    "get_ipython().system('true')\ntrace.append({n})",
    "v = get_ipython().getoutput('echo {n}')\nv = list(v)",
    "%run m.py {n}",
    "%run -i shared.py {n}",
    "%run n.ipynb",
    "if {n} > 1:\n    %run n.ipynb\n    trace.append({n})",
]
WHOLE = [
    "%%bash\necho {n}\nif [ a ]; then true; fi",
    "%%writefile written.py\ntrace.append(",
    "%%html\n<b>{n}</b>",
    "%%script false --no-raise-error\ntrace.append(0)",
    "%%timeit -n1 -r1 i = {n}\nv = [i + w for w in [1]]\n!true\nif v:\n    trace.append(v)\n"
    "s = '''\n'''",
    "!echo {n}",
    "pwd",
    "time trace.append({n})",
    "ls -la",
    ">>> trace.append({n})\n>>> if trace:\n...     v = {n}",
    "    trace.append({n})\n    v = {n}",
]
HEADS = [
    "",
    "",
    "",
    "%%time\n",
    "%%capture\n",
    "%%capture out\n",
    "%%time\n%%capture\n",
    "\n",
    "%%prun -q\n",
]


def _cell(head: str, bodies: list[str], start: int) -> str:
    numbered = [body.format(n=start + at) for at, body in enumerate(bodies)]
    if head.startswith("%%"):  # in IPython, these run their body where `await` is not allowed
        numbered = [body for body in numbered if "await" not in body]
    return head + "\n".join(numbered or ["pass"])  # IPython refuses a magic without a body


cells = st.one_of(
    st.builds(
        _cell,
        st.sampled_from(HEADS),
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
        st.integers(1, 9),
    ),
    st.builds(lambda text, n: text.format(n=n), st.sampled_from(WHOLE), st.integers(1, 9)),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("import sys\nbrought = sys.argv[1:]\n", encoding="utf-8")
    (tmp_path / "shared.py").write_text(
        "import sys\nshared = sys.argv[1:]\ntrace.append(shared)\n", encoding="utf-8"
    )
    other = ["%time trace.append('n')", "!true\nfor i in range(2):\n    trace.append(i)"]
    nb = v4.new_notebook(cells=[v4.new_code_cell(source) for source in other])
    nbformat.write(nb, tmp_path / "n.ipynb")
    return tmp_path


def check(sources: list[str], folder: Path, ipython: Shell) -> dict[str, Any]:
    """That the script of a run and the exported one leave what IPython leaves; these values."""
    expected: dict[str, Any]
    _, expected = ipython.run(folder, START, *sources, names=NAMES)
    for export in (None, Export.WITH_SETUP):
        script = convert(notebook(START, *sources, f"%%tpu_train\n{END}"), export=export)
        compile(script.text, "script.py", "exec", dont_inherit=True)
        done = run(script, folder)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected
    return expected


def test_each_construct(folder: Path, ipython: Shell) -> None:
    """All of them once, so that what the random notebooks hold is shown to work."""
    sources = [source.format(n=n) for n in (1, 2) for source in [*PIECES, *WHOLE]]
    assert len(check(sources, folder, ipython)["trace"]) > len(PIECES)


CHANGED = re.compile(
    r"%|!|\?|^,|^/|^ *ls|pwd|^time|global|__future__|await|asyncio|get_ipython", re.M
)
"""In cells of which some lines change."""


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(cells, min_size=1, max_size=4))
def test_random_notebooks_compile_and_keep_their_lines(folder: Path, sources: list[str]) -> None:
    snapshot = notebook(START, *sources, "%%tpu_train\nprint(trace)")
    script = convert(snapshot)
    compile(script.text, "script.py", "exec", dont_inherit=True)
    for cell in snapshot.cells:
        source, made = cell.source.split("\n"), lines_of(script, cell.index)
        assert len(made) == len(source)
        if not CHANGED.search(cell.source):
            plain = [re.sub(r"^(>>> |\.\.\. )?", "", line).strip() for line in source]
            assert [line.strip() for line in made] == plain


@pytest.mark.parametrize(
    "text",
    [
        "{a} {n:.2f}",
        "{n:>3}",
        "{b[1:2]} {b[:1]!r} {a!s} {e!a}",
        "{n} {e!r:>3}",
        "{a!x}",
        "{d['k']} {n + 1} {len(b)}",
        "{'x' if n else 'y'} { n }",
        "{n:{n}}",
        "{d} {} $a",
        "{{n}} {{print $1}} {n}",
        "{(lambda: 3)()} {n}",
        "{n if} {n}",
        "$a.b",
        "$n.real $n $$n '$n'",
        "$a.",
        "$b[0] {b[0]}",
    ],
)
def test_values_are_filled_in_as_in_ipython(ipython: Shell, tmp_path: Path, text: str) -> None:
    start = "a = 'A'; b = [1, 2, 3]; d = {'k': 'v'}; n = 7; e = 'é'"
    _, values = ipython.run(
        tmp_path, start, f"filled = get_ipython().var_expand({text!r})", names=("filled",)
    )
    names: dict[str, object] = {}
    exec(start, names)
    assert eval(interpolated(text), names) == values["filled"]
