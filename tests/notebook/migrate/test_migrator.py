"""The rewriting of each kind of old code, as cells before and after."""

from __future__ import annotations

import copy
import json
from textwrap import dedent

import nbformat
import pytest

from tests.notebook.lint.notebooks import found
from tests.notebook.migrate.notebooks import migrated, notebook, sources
from tpunb.errors import NotebookError
from tpunb.notebook.migrate import migrate, migrate_text

XM = "import torch_xla.core.xla_model as xm\n"
HEAD = "import torch\nimport torch_xla\n" + XM

REWRITTEN = {
    "world size and ordinals": (
        "import torch_xla\nimport torch_xla.core.xla_model as xm\n"
        "print(xm.xrt_world_size(), xm.get_ordinal(0),xm.get_local_ordinal( ) )",
        "import torch_xla\nimport torch_xla.runtime as xr\n"
        "print(xr.world_size(), xr.global_ordinal(),xr.local_ordinal( ) )",
    ),
    "device and step": (
        "import torch_xla\nimport torch_xla.core.xla_model as xm  # TPU\n"
        "device = xm.xla_device()\nxm.mark_step()  # now",
        "import torch_xla\nimport torch_xla.core.xla_model as xm  # TPU\n"
        "device = torch_xla.device()\ntorch_xla.sync()  # now",
    ),
    "a device by its kind": (
        "import torch_xla, torch_xla.core.xla_model as xm\n"
        "a = xm.xla_device(n=0, devkind='TPU')\nb = xm.get_xla_supported_devices('TPU', 2)",
        "import torch_xla, torch_xla.core.xla_model as xm\n"
        "a = torch_xla.device(0)\nb = xm.get_xla_supported_devices(2)",
    ),
    "the first package": (
        "import torch_xla_py.xla_model as xm\nimport torch_xla_py.parallel_loader as pl\n"
        "xm.optimizer_step(o)",
        "import torch_xla.core.xla_model as xm\n"
        "import torch_xla.distributed.parallel_loader as pl\nxm.optimizer_step(o)",
    ),
    "names imported from the first package": (
        "from torch_xla_py import xla_model as xm, utils\nxm.optimizer_step(utils)",
        "from torch_xla.core import xla_model as xm\nfrom torch_xla.utils import utils\n"
        "xm.optimizer_step(utils)",
    ),
    "full names": (
        "import torch_xla_py.xla_model\nprint(torch_xla_py.xla_model.xla_device())",
        "import torch_xla.core.xla_model\nprint(torch_xla.device())",
    ),
    "a function imported by its name": (
        "from torch_xla.core.xla_model import get_ordinal, optimizer_step\nprint(get_ordinal(0))",
        "from torch_xla.runtime import global_ordinal as get_ordinal\n"
        "from torch_xla.core.xla_model import optimizer_step\nprint(get_ordinal())",
    ),
    "spawn with a number of processes": (
        "import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp\n"
        "xmp.spawn(f, args=(1,), nprocs=8,\n          start_method='fork')",
        "import torch_xla\ntorch_xla.launch(f, args=(1,),\n          start_method='fork')",
    ),
    "spawn in one process, by position": (
        "import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp\n"
        "def f(i): pass\nxmp.spawn(f, (), 1)",
        "import torch_xla\n"
        "def f(i): pass\ntorch_xla.launch(f, (), debug_single_process=True, start_method='fork')",
    ),
    "spawn with a computed number": (
        "import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp\n"
        "from module import f\nxmp.spawn(f, nprocs=8 if tpu else 1, join=True)",
        "import torch_xla\n"
        "from module import f\ntorch_xla.launch(f, debug_single_process=(8 if tpu else 1) == 1)",
    ),
    "a loader at once": (
        "import torch_xla.distributed.parallel_loader as pl\n"
        "for b in pl.ParallelLoader(loader, [device], batchdim=1).per_device_loader(device): pass",
        "import torch_xla.distributed.parallel_loader as pl\n"
        "for b in pl.MpDeviceLoader(loader, device, batchdim=1): pass",
    ),
    "a loader made first": (
        "import torch_xla.distributed.parallel_loader as pl\n"
        "def g(device):\n"
        "    for e in range(2):\n"
        "        para = pl.ParallelLoader(train, [device])\n"
        "        loop(para.per_device_loader(device))\n"
        "        para = pl.ParallelLoader(test, [device])\n"
        "        loop(model, para.per_device_loader(device), e)\n"
        "        del para",
        "import torch_xla.distributed.parallel_loader as pl\n"
        "def g(device):\n"
        "    for e in range(2):\n"
        "        para = pl.MpDeviceLoader(train, device)\n"
        "        loop(para)\n"
        "        para = pl.MpDeviceLoader(test, device)\n"
        "        loop(model, para, e)\n"
        "        del para",
    ),
    "a sampler for eight": (
        "import torch_xla\nimport torch_xla.core.xla_model as xm\n"
        "S(xm.xla_device(), num_replicas=8, rank=xm.get_ordinal(), n=8)\nS(num_replicas=8, rank=0)",
        "import torch_xla\nimport torch_xla.runtime as xr\n"
        "S(torch_xla.device(), num_replicas=xr.world_size(), rank=xr.global_ordinal(), n=8)\n"
        "S(num_replicas=8, rank=0)",
    ),
    "autocast": (
        "import torch\nfrom torch_xla.amp import autocast\n"
        "with autocast(torch_xla.device(), enabled=on):\n    pass",
        "import torch\nfrom torch import autocast\n"
        "with autocast('xla', enabled=on, dtype=torch.bfloat16):\n    pass",
    ),
    "the backend of torch.distributed": (
        "import torch_xla.experimental.pjrt_backend\n"
        "dist.init_process_group('xla', init_method='pjrt://')",
        "import torch_xla.distributed.xla_backend\n"
        "dist.init_process_group('xla', init_method='xla://')",
    ),
    "experimental modules": (
        "from torch_xla.experimental import pjrt\n"
        "import torch_xla.experimental.xla_sharding as xs\npjrt.world_size()",
        "from torch_xla import runtime as pjrt\n"
        "import torch_xla.distributed.spmd.xla_sharding as xs\npjrt.world_size()",
    ),
    "SPMD by a variable": (
        "import os\nos.environ['XLA_USE_SPMD'] = '1'\nimport torch_xla",
        "import os\nimport torch_xla.runtime as xr\nxr.use_spmd()\nimport torch_xla",
    ),
    "a magic in front of a statement": (
        f"import torch_xla\n{XM}%time x = xm.xla_device()",
        "import torch_xla\n%time x = torch_xla.device()",
    ),
    "options of a magic in front of a statement": (
        f"import torch_xla\n{XM}%timeit -n 3 xm.xla_device()",
        "import torch_xla\n%timeit -n 3 torch_xla.device()",
    ),
    "f-strings, and text that is not ASCII": (
        f"import torch_xla\n{XM}"
        "print(f'é {xm.xla_device()!r:>{n}} {xm.mark_step( )}', 'é', f'''\n é {xm.mark_step()}''')",
        "import torch_xla\n"
        "print(f'é {torch_xla.device()!r:>{n}} {torch_xla.sync( )}', 'é', "
        "f'''\n é {torch_xla.sync()}''')",
    ),
    "parentheses, and lines that are continued": (
        f"import torch_xla\n{XM}"
        "x = [(xm.xla_device)( ( 0 ), ), xm.\\\n  mark_step(  # now\n)]\ny = (xm.get_ordinal(1))",
        "import torch_xla\nimport torch_xla.runtime as xr\n"
        "x = [torch_xla.device( ( 0 ), ), torch_xla.sync(  # now\n)]\n"
        "y = (xr.global_ordinal())",
    ),
    "decorators, and blocks on the line of their head": (
        f"import torch_xla\n{XM}@f(xm.xla_device())\ndef g(a=xm.save): return xm.mark_step()",
        f"import torch_xla\n{XM}@f(torch_xla.device())\ndef g(a=xm.save): return torch_xla.sync()",
    ),
    "an import where the old name was imported": (
        f"def f():\n    {XM}    return xm.get_ordinal()\nif tpu:\n    import torch_xla\n",
        "def f():\n    import torch_xla.runtime as xr\n    return xr.global_ordinal()\n"
        "if tpu:\n    import torch_xla\n",
    ),
    "an alias that is taken": (
        f"import xarray as xr\n{XM}xm.get_ordinal()",
        "import xarray as xr\nimport torch_xla.runtime\ntorch_xla.runtime.global_ordinal()",
    ),
    "the body of a cell magic": (
        f"%%time\n# first\nimport torch_xla\n{XM}!ls {{x}}\nxm.mark_step()\n%matplotlib inline",
        "%%time\n# first\nimport torch_xla\n!ls {x}\ntorch_xla.sync()\n%matplotlib inline",
    ),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_cell_is_rewritten(case: str) -> None:
    before, after = REWRITTEN[case]
    assert migrated(before) == [after]


def test_imports_of_one_cell_serve_the_others_and_are_added_once() -> None:
    first, second, third = migrated(
        XM + "import torch", "a = xm.xrt_world_size()", "b = xm.get_ordinal() + xm.REDUCE_SUM"
    )
    assert first == XM + "import torch_xla.runtime as xr\nimport torch"
    assert (second, third) == ("a = xr.world_size()", "b = xr.global_ordinal() + xm.REDUCE_SUM")


def test_what_is_the_notebooks_own_is_left_alone() -> None:
    cells = (
        "def get_ordinal():\n    return 0\nclass xm:\n    xla_device = staticmethod(get_ordinal)",
        "print(get_ordinal(), xm.xla_device())\nspawn = ParallelLoader = None\nspawn.xla_device",
        "import other.xla_model as om\nom.xla_device()",
    )
    assert migrated(*cells) == list(cells)


def test_a_name_of_two_meanings_is_marked_once() -> None:
    cell = f"try:\n    {XM}except ImportError:\n    xm = Fake()\n"
    first, second = migrated(cell, "if x:\n    y = xm.get_ordinal()")
    assert first == cell
    assert second.splitlines()[1].startswith("    # tpunb migrate: `xm.get_ordinal` may be")
    assert second.splitlines()[2] == "    y = xm.get_ordinal()"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("xm.parse_xla_device(d)", "device.index"),
        ("torch_xla.amp.GradScaler()", "bfloat16"),
        ("pl.ParallelLoader(loader, devices)", "MpDeviceLoader"),
        ("next(pl.ParallelLoader(l, [d]).per_device_loader(d))", "MpDeviceLoader"),
        ("xmp.spawn(*arguments)", "torch_xla.launch"),
        ("address = os.environ.get('COLAB_TPU_ADDR')", "part of the machine"),
        ("os.system('python -m torch_xla.distributed.xla_dist')", "--worker=all"),
        ("!pip install torch==1.5.1 transformers", "needs torch 2.9"),
        ("tpu = f\"grpc://{os.environ['TPU_NAME']}\"", "TPU nodes are gone"),
        ("tpu = dict(address='grpc://10.0.0.2:8470')", "TPU nodes are gone"),
        ("os.environ.update(XRT_TPU_CONFIG='tpu_worker;0;1.2.3.4:8470')", "TPU nodes are gone"),
        ("!python train.py --tpu grpc://$TPU_ADDR", "TPU nodes are gone"),
    ],
)
def test_what_cannot_be_rewritten_is_marked(line: str, advice: str) -> None:
    head = (
        HEAD + "import torch_xla.amp, os\n"
        "import torch_xla.distributed.parallel_loader as pl\n"
        "import torch_xla.distributed.xla_multiprocessing as xmp\n"
    )
    made = migrate(notebook(head, f"if True:\n    {line}"))
    first, mark, rest = sources(made)[1].split("\n")
    assert (first, rest) == ("if True:", f"    {line}")
    assert mark.startswith("    # tpunb migrate: ")
    assert advice in mark
    (change,) = [one for one in made.changes if one.kind == "marked"]
    assert (change.cell, change.line) == (1, 2)
    assert migrate(made.notebook).notebook == made.notebook


def test_a_device_by_its_number_is_rewritten_and_marked() -> None:
    (cell,) = migrated(HEAD + "d = xm.xla_device(fold + 1)")
    assert cell.splitlines()[-2].startswith("# tpunb migrate: Devices are numbered from 0")
    assert cell.splitlines()[-1] == "d = torch_xla.device(fold + 1)"


def lines_left(cell: str) -> list[str]:
    return [line for line in cell.splitlines() if not line.lstrip().startswith("#")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("xmp.spawn(f, nprocs=8)", "torch_xla.launch(f, start_method='fork')"),
        (
            "xmp.spawn(f, args=(1,),  # one\n    nprocs=8)",
            "torch_xla.launch(f, args=(1,), start_method='fork',  # one\n    )",
        ),
        (
            "xmp.spawn(f, (1,), 8,  # one\n    join=True)",
            "torch_xla.launch(f, (1,), start_method='fork',  # one\n    )",
        ),
        (
            "xmp.spawn(f,  # one\n    nprocs=n)",
            "torch_xla.launch(f,  # one\n    debug_single_process=n == 1, start_method='fork')",
        ),
        (
            "xmp.spawn(\n    f,\n    nprocs=8,\n)",
            "torch_xla.launch(\n    f, start_method='fork',\n)",
        ),
    ],
)
def test_comments_among_the_arguments_of_a_launch(before: str, after: str) -> None:
    head = "import torch_xla.distributed.xla_multiprocessing as xmp\ndef f(index): ...\n"
    [cell] = migrate(notebook(head + before)).notebook["cells"]
    source = "".join(cell["source"])
    compile(source, "cell", "exec")
    assert source.endswith(f"def f(index): ...\n{after}")


def test_setup_lines_become_comments_under_one_that_says_why() -> None:
    first, second, third = migrated(
        'VERSION = "nightly"  #@param ["1.5", "nightly"]\n'
        "!curl https://raw.example/env-setup.py -o pytorch-xla-env-setup.py\n"
        "!python pytorch-xla-env-setup.py --version $VERSION\n"
        "!pip install transformers",
        "!export XLA_USE_BF16=1\n%env XRT_TPU_CONFIG=x\n%env A=b",
        "import os\nassert os.environ['COLAB_TPU_ADDR'], 'Select'\nos.environ['XRT_WORKERS'] = ''",
    )
    assert lines_left(first) == ["!pip install transformers"]
    assert first.count("# tpunb migrate:") == 1
    assert "# | !python pytorch-xla-env-setup.py --version $VERSION" in first
    assert lines_left(second) == ["%env A=b"]
    assert "torch.bfloat16" in second
    assert lines_left(third) == ["import os"]


@pytest.mark.parametrize("head", ["!", "%%bash\n"])
@pytest.mark.parametrize(
    "line",
    [
        "export XLA_USE_BF16=1; python train.py",
        'export XRT_TPU_CONFIG="tpu_worker;0;$IP:8470" && python train.py --epochs 3',
        "python env-setup.py --version 1.7 && python train.py",
        "pip install -q cloud-tpu-client==0.10 https://x.org/torch_xla-1.9-cp37.whl datasets",
    ],
)
def test_a_shell_line_that_does_more_than_set_up_is_marked_and_stays(head: str, line: str) -> None:
    (cell,) = migrated(head + line)
    assert cell.splitlines()[-1] == (head + line).splitlines()[-1]
    assert cell.count("# tpunb migrate:") == 1
    assert migrated(f"{head}export XLA_USE_BF16=1; export XRT_WORKERS=a")[0].count("# ") > 1


@pytest.mark.parametrize("head", ["!", "x = !", "%%bash\n"])
@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("XLA_USE_BF16=1 python train.py", 1),
        ("cd x && env A='b c' XLA_USE_BF16=1 XRT_WORKERS=a XLA_USE_SPMD=1 python train.py", 3),
        ("A=1 XRT_TPU_CONFIG=tpu_worker;0;10.0.0.2:8470 python train.py", 1),
        ("A=1 python train.py --set XLA_USE_BF16=1", 0),
        ("echo XLA_USE_BF16=1 python", 0),
    ],
)
def test_variables_in_front_of_a_command_are_marked(head: str, line: str, count: int) -> None:
    (cell,) = migrated(head + line)
    assert cell.splitlines()[-1] == (head + line).splitlines()[-1]
    assert cell.count("# tpunb migrate:") == count


def test_a_pair_of_which_half_is_taken_out_is_none_in_the_first_run_either() -> None:
    other = "!pip install torch==1.7.1 torchtext==0.8.0"
    made = migrate(
        notebook("!pip install https://x.org/tpu-pytorch/wheels/torch_xla-1.7-cp36.whl", other)
    )
    assert sources(made)[1].endswith(
        f"needs torch 2.9: another in its place cannot be used with a TPU.\n{other}"
    )
    assert migrate(made.notebook).notebook == made.notebook


def test_a_block_of_which_nothing_is_left_gets_a_pass() -> None:
    (cell,) = migrated(
        "if tpu:\n    !python env-setup.py \\\n       --version 1\nelse:\n    x = 1\n"
    )
    assert lines_left(cell) == ["if tpu:", "    pass", "else:", "    x = 1"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import os; os.environ['XLA_USE_BF16'] = '1'; x = 1", "import os; x = 1"),
        ("os.environ['XLA_USE_BF16'] = '1'; os.putenv('XRT_A', '1'); x = 1", "x = 1"),
        ("x = 1; os.environ['XLA_USE_BF16'] = '1'; os.putenv('XRT_A', '1')", "x = 1"),
        ("if x: os.environ['XLA_USE_BF16'] = '1'", "if x: pass"),
    ],
)
def test_statements_that_share_a_line_are_taken_out(before: str, after: str) -> None:
    (cell,) = migrated(before)
    *marks, line = cell.splitlines()
    assert line == after
    assert "`os.environ['XLA_USE_BF16'] = '1'`" in marks[0]


def test_a_line_of_which_nothing_is_left_becomes_a_comment() -> None:
    (cell,) = migrated("os.environ['XLA_USE_BF16'] = '1'; os.putenv('XRT_A', '1')")
    assert not lines_left(cell)


UPDATE = """\
import collections, os, threading
from datetime import datetime
_VersionConfig = collections.namedtuple('_VersionConfig', 'wheels,server')
VERSION = "nightly"
CONFIG = {'nightly': _VersionConfig('nightly', 'XRT-dev')}[VERSION]
WHEEL = 'torch_xla-{}.whl'.format(CONFIG.wheels)
EPOCHS = 3

def update_server_xrt():
  url = 'http://{}:8475/requestversion/{}'.format(os.environ['COLAB_TPU_ADDR'], CONFIG.server)

update = threading.Thread(target=update_server_xrt)
update.start()
!pip uninstall -y torch torchvision
!gsutil cp "$WHEEL" .
!pip install "$WHEEL"
!pip install seaborn
update.join()
"""


def test_the_server_update_of_2020_is_taken_out_but_for_what_is_used_elsewhere() -> None:
    first, second = migrated(UPDATE, "print(EPOCHS, datetime)\n!pip install $WHEEL")
    assert [line for line in lines_left(first) if line] == [
        "import collections, os, threading",
        "from datetime import datetime",
        "EPOCHS = 3",
        "!pip install seaborn",
    ]
    assert lines_left(second) == ["print(EPOCHS, datetime)"]


def test_lines_of_a_shell_cell_are_taken_out() -> None:
    (cell,) = migrated("%%bash\nif true; then\n  python env-setup.py \\\n    --x 1\n  ls\nfi\n")
    assert lines_left(cell) == ["%%bash", "if true; then", "  ls", "fi"]


def test_addresses_of_tpu_nodes_in_magics_and_shells() -> None:
    magic, shell = migrated(
        "%env TPU_ADDR=grpc://10.0.0.2:8470\n%env TRACES=grpc://localhost:4317",
        "%%bash\npython train.py --tpu=grpc://$TPU_ADDR",
    )
    assert lines_left(magic) == ["%env TRACES=grpc://localhost:4317"]
    assert lines_left(shell) == ["%%bash", "python train.py --tpu=grpc://$TPU_ADDR"]
    assert shell.count("TPU nodes are gone") == 1
    assert migrated(magic, shell) == [magic, shell]


def test_a_command_for_all_hosts_is_named() -> None:
    (cell,) = migrated("!python -m torch_xla.distributed.xla_dist --tpu=$T -- python a.py --b 'c'")
    assert (
        "`gcloud compute tpus tpu-vm ssh $T --worker=all --command='python a.py --b \"c\"'`" in cell
    )
    assert not lines_left(cell)


def test_a_gone_module_whose_name_is_used_is_marked_and_stays() -> None:
    """Otherwise the notebook would fail when it is used, perhaps at the end of a training."""
    first, second = migrated(
        "import torch\nimport torch_xla.utils.tf_record_reader as reader", "r = reader.Reader(p)"
    )
    assert lines_left(first) == first.splitlines()[:1] + first.splitlines()[2:]
    assert "import torch_xla.utils.tf_record_reader as reader" in first.splitlines()
    assert second.splitlines()[0].startswith("# tpunb migrate: Read TFRecord files")


def test_a_cell_that_is_not_python_is_left_alone_and_reported() -> None:
    cells = ("gcloud compute tpus list \\\n  --zone z", "%%html\n<b>xm.xla_device()</b>", "x = (")
    made = migrate(notebook(*cells))
    assert sources(made) == list(cells)
    assert [(one.kind, one.cell) for one in made.changes] == [("skipped", 0), ("skipped", 2)]


def test_an_import_that_only_old_names_used_is_taken_out() -> None:
    assert migrated(HEAD + "xm.mark_step()", "y = 1") == [
        "import torch\nimport torch_xla\ntorch_xla.sync()",
        "y = 1",
    ]
    kept = HEAD + "xm.mark_step()\nxm.save(x)", "import torch_xla.debug.metrics as met"
    assert migrated(*kept)[0] == HEAD + "torch_xla.sync()\nxm.save(x)"
    assert migrated(*kept)[1] == kept[1]


def test_a_module_that_a_cell_writes_is_a_program_of_its_own() -> None:
    old = HEAD + "xm.save(xm.xla_device())"
    first, second, third = migrated(
        f"%%writefile a.py\n{old}", "xm.mark_step()", f"%%writefile a.txt\n{old}", train=True
    )
    assert first == "%%writefile a.py\n" + HEAD + "xm.save(torch_xla.device())"
    assert (second, third) == ("xm.mark_step()", f"%%writefile a.txt\n{old}")


def test_an_import_that_an_unread_cell_mentions_stays() -> None:
    spawn = (
        "import torch_xla\nimport torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f)"
    )
    assert "as xmp" not in migrated(spawn)[0]
    assert "as xmp" in migrated(spawn, "xmp.spawn((")[0]


def test_outputs_metadata_and_the_form_of_sources_are_kept() -> None:
    given = notebook(
        "markdown: use `xm.xla_device()`", HEAD + "xm.save\nxm.xla_device()", "print(1)"
    )
    given["cells"][1]["source"] = given["cells"][1]["source"].splitlines(keepends=True)
    before = copy.deepcopy(given)
    made = migrate(given)
    assert given == before
    expected = copy.deepcopy(before)
    expected["cells"][1]["source"][-1] = "torch_xla.device()"
    assert made.notebook == expected


def test_a_node_of_nbformat_is_taken_as_well() -> None:
    node = nbformat.from_dict(notebook(HEAD + "xm.save(xm.xla_device())"))
    assert sources(migrate(node)) == [HEAD + "xm.save(torch_xla.device())"]


def test_what_only_the_old_backend_did_on_a_tpu_v2_or_v3_is_said() -> None:
    cell = REWRITTEN["the backend of torch.distributed"][0]
    report = migrate(notebook(cell)).report()
    assert "pjrt:// → xla://; on a TPU v2 or v3, for one core only" in report
    source = "import torch_xla.experimental.pjrt_backend as backend\nbackend.dist"
    [finding] = [each for each in found(source) if each.rule == "old-name"]
    assert "On a TPU v2 or v3 use one core" in str(finding.fix)


def test_the_report_says_what_was_done_and_what_is_left() -> None:
    made = migrate(notebook(HEAD + "xm.mark_step()\nxm.parse_xla_device(d)"))
    report = made.report()
    assert "1 rewritten:" in report
    assert "cell [1], line 4: xm.mark_step()\n    xm.mark_step → torch_xla.sync" in report
    assert "1 to be checked" in report
    assert migrate(notebook("x = 1")).report() == "nothing to migrate\n"


def test_the_diff_goes_cell_by_cell() -> None:
    made = migrate(notebook("x = 1", HEAD + "xm.mark_step()\nxm.save(x)"))
    assert made.diff() == dedent(
        """\
        --- cell [1]
        +++ cell [1]
        @@ -1,5 +1,5 @@
         import torch
         import torch_xla
         import torch_xla.core.xla_model as xm
        -xm.mark_step()
        +torch_xla.sync()
         xm.save(x)
        """
    )


@pytest.mark.parametrize("indent", [None, 1, "\t"])
def test_a_file_that_needs_no_change_stays_as_it_is(indent: int | str | None) -> None:
    text = json.dumps(notebook("markdown: # É", "print(1)"), indent=indent)
    assert migrate_text(text) == (text, migrate(json.loads(text)))


@pytest.mark.parametrize("train", [False, True])
def test_a_changed_file_is_formatted_as_by_jupyter(train: bool) -> None:
    given = notebook(
        "markdown: # É", "import torch_xla\ntorch_xla.launch(f)", HEAD + "xm.get_ordinal()"
    )
    text, migration = migrate_text(json.dumps(given), train=train)
    again = nbformat.reads(text, as_version=4)
    nbformat.validate(again)
    assert again == nbformat.reads(json.dumps(migration.notebook), as_version=4)
    assert text == nbformat.writes(again) + "\n"
    assert "É" in text
    assert migrate_text(text, train=train)[0] == text
    assert ("--- a new cell\n+++ a new cell\n" in migration.diff()) == train


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"nbformat": 3, "worksheets": []}', "nbconvert --to notebook"),
    ],
)
def test_text_that_is_not_a_notebook_is_refused(text: str, words: str) -> None:
    with pytest.raises(NotebookError, match=words):
        migrate_text(text)


def test_the_same_import_twice_at_the_end_of_a_cell() -> None:
    twice = "import torch_xla.core.xla_model as xm\nimport torch_xla.core.xla_model as xm"
    made = migrate(notebook(twice, "device = xm.xla_device()"))
    assert sources(made) == ["import torch_xla", "device = torch_xla.device()"]
