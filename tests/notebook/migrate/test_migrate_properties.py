"""For arbitrary notebooks: a second migration changes nothing, and other text is unchanged."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.notebook.migrate.notebooks import notebook, sources
from tests.support import examples
from tpunb.notebook.migrate import migrate
from tpunb.notebook.migrate.report import MARK

OTHER = [
    "x = 1  # a comment",
    "",
    "# only a comment",
    "def f( a,b ):\n    '''doc\n  string'''\n    return (a ,b)",
    "!ls -la {x} | grep $HOME",
    "%matplotlib inline",
    "y = !echo 1",
    "if x:\n\t!pip install transformers\n\tz = 1\nelse: pass",
    "text = '''\n%%time\nxm.mark_step()\n'''",
    "é = 'ü' ; print( é )",
    "print(f)?",
    "class xm2:\n  def get_ordinal(self): return 0\nxm2().get_ordinal()",
    "try:\n    import numpy as np\nexcept ImportError:\n    np = None",
]
OLD = [
    "import torch_xla",
    "import torch_xla.core.xla_model as xm",
    "import torch_xla_py.xla_model as xm",
    "from torch_xla.core.xla_model import get_ordinal, save",
    "import torch_xla.distributed.parallel_loader as pl",
    "import torch_xla.distributed.xla_multiprocessing as xmp",
    "import torch_xla.utils.gcsfs as gcsfs",
    "device = xm.xla_device( )",
    "d = xm.xla_device(n=3)",
    "xm.mark_step(); xm.xrt_world_size()",
    "if get_ordinal():\n    r = xm.get_ordinal(0)",
    "xmp.spawn(f, args=(1,),  # one\n    nprocs=8)",
    "xm = None",
    "pl.ParallelLoader(l, [device]).per_device_loader(device)",
    "p = pl.ParallelLoader(l, [device])\nq = p.per_device_loader(device)",
    "p.other",
    "xm.parse_xla_device(gcsfs.x)",
    "!python env-setup.py --version $VERSION",
    "VERSION = 'nightly'",
    "import os; os.environ['XLA_USE_BF16'] = '1'",
    "if x:\n    os.environ['XRT_TPU_CONFIG'] = 'a'",
    "os.environ['XLA_USE_SPMD'] = '1'",
    "%env XLA_USE_BF16=1",
    "print(os.environ['COLAB_TPU_ADDR'])",
    "!pip uninstall -y torch",
]
HEADS = ["", "%%time\n", "%%capture out\n# note\n", "%%bash\n", "%%writefile a.py\n"]

cells = st.lists(
    st.builds(
        lambda head, parts: head + "\n".join(parts),
        st.sampled_from([*HEADS[:1] * 6, *HEADS[1:]]),
        st.lists(st.sampled_from(OTHER + OLD), max_size=6),
    ),
    min_size=1,
    max_size=4,
)
others = st.lists(
    st.builds("\n".join, st.lists(st.sampled_from(OTHER), max_size=6)), min_size=1, max_size=4
)
calm = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@calm
@given(cells, st.booleans())
def test_a_second_run_changes_nothing(given_cells: list[str], train: bool) -> None:
    made = migrate(notebook(*given_cells), train=train)
    again = migrate(made.notebook, train=train)
    assert sources(again) == sources(made)
    assert not [change for change in again.changes if change.kind != "skipped"]


@calm
@given(cells)
def test_what_could_be_read_can_be_read_after_it(given_cells: list[str]) -> None:
    made = migrate(notebook(*given_cells))
    again = migrate(made.notebook)
    skipped = [[one.cell for one in run.changes if one.kind == "skipped"] for run in (made, again)]
    assert skipped[0] == skipped[1]


@calm
@given(others, st.data())
def test_text_that_has_nothing_to_do_with_torch_xla_stays(
    given_cells: list[str], data: st.DataObject
) -> None:
    assert sources(migrate(notebook(*given_cells))) == given_cells
    old = "import torch_xla\nimport torch_xla.core.xla_model as xm\nprint(xm.xla_device(), xm.save)"
    place = data.draw(st.integers(0, len(given_cells)))
    mixed = [*given_cells[:place], old, *given_cells[place:]]
    expected = [*given_cells[:place], old.replace("xm.xla", "torch_xla."), *given_cells[place:]]
    expected[place] = old.replace("xm.xla_device", "torch_xla.device")
    assert sources(migrate(notebook(*mixed))) == expected


@calm
@given(cells)
def test_every_line_is_there_still_or_named_in_the_report(given_cells: list[str]) -> None:
    made = migrate(notebook(*given_cells))
    reported = {(change.cell, change.before) for change in made.changes}
    for index, (before, after) in enumerate(zip(given_cells, sources(made), strict=True)):
        if before != after and MARK not in after:
            assert any(cell == index for cell, _ in reported)
