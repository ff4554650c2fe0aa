"""The stack that a notebook is written for, from its code."""

from __future__ import annotations

import pytest

from tpunb.notebook.convert.stack import StackEvidence, names_cpu_only, stacks_named, written_for
from tpunb.runs.spec import BackendName

CERTAIN: dict[str, tuple[BackendName, str]] = {
    "import torch_xla": ("xla", "import torch_xla"),
    "from torch_xla import runtime as xr": ("xla", "from torch_xla import runtime"),
    "d = torch.device('xla')": ("xla", 'device("xla")'),
    "x.to('xla:0')": ("xla", 'to("xla:0")'),
    "dist.init_process_group('xla', init_method='xla://')": ("xla", 'init_process_group("xla")'),
    "torch.compile(f, backend='openxla')": ("xla", 'compile("openxla")'),
    "with torch.autocast('xla'): pass": ("xla", 'autocast("xla")'),
    "%%tpu_train --cores 4\nimport torch_xla": ("xla", "import torch_xla"),
    "import torch_tpu": ("torchtpu", "import torch_tpu"),
    "from torch import tpu": ("torchtpu", "from torch import tpu"),
    "torch.tpu.synchronize()": ("torchtpu", "torch.tpu.synchronize"),
    "model.to('tpu', dtype=torch.bfloat16)": ("torchtpu", 'to("tpu")'),
    "model.tpu()": ("torchtpu", ".tpu()"),
    "torch.zeros(2, device=f'tpu:{rank}')": ("torchtpu", 'zeros(device="tpu:")'),
    "torch.autocast(device_type='tpu')": ("torchtpu", 'autocast(device_type="tpu")'),
    "DEVICE = 'tpu'": ("torchtpu", 'DEVICE = "tpu"'),
    "def f(x, device='tpu'): ...": ("torchtpu", 'device = "tpu"'),
    "dist.init_process_group('tpu_dist')": ("torchtpu", 'init_process_group("tpu_dist")'),
    "dist.init_process_group(backend='cpu:gloo,tpu:tpu_dist')": (
        "torchtpu",
        'init_process_group("cpu:gloo,tpu:tpu_dist")',
    ),
    "model.cuda()": ("torch", ".cuda()"),
    "from torch.cuda.amp import autocast": ("torch", "from torch.cuda.amp import autocast"),
    "dist.init_process_group('gloo')": ("torch", 'init_process_group("gloo")'),
}
WEAK: dict[str, set[BackendName]] = {
    "try:\n    import torch_xla\nexcept ImportError:\n    torch_xla = None": {"xla"},
    "try:\n    x = 1\nexcept ImportError:\n    import torch_xla": {"xla"},
    "if torch.cuda.is_available():\n    model.cuda()\nelse:\n    model.to('tpu')": {
        "torch",
        "torchtpu",
    },
    "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')": {"torch"},
    "if args.use_tpu:\n    import torch_xla": {"xla"},
    "from torch.nn.parallel import DistributedDataParallel as DDP": {"torch"},
    "dist.init_process_group()": {"torch"},
}
NONE = [
    "print('import torch_xla, torch_tpu or cuda')",
    "# import torch_xla",
    "s = 'tpu'",
    "%%bash\npython -c 'import torch_xla'",
    "import torch_xla_extras",
    "import torch\nx = torch.device('cpu')",
    "importlib.util.find_spec('torch_xla')",
    "import torch_xla.(",
    "tf.device('/TPU:0')",
    "from . import torch_xla",
]


@pytest.mark.parametrize("source", CERTAIN, ids=CERTAIN)
def test_certain_evidence(source: str) -> None:
    stack, found = CERTAIN[source]
    assert [(name, one.found, one.certain) for name, one in stacks_named([source]).items()] == [
        (stack, found, True)
    ]


@pytest.mark.parametrize("source", WEAK, ids=WEAK)
def test_code_that_other_stacks_may_run_is_weak(source: str) -> None:
    found = stacks_named([source])
    assert set(found) == WEAK[source]
    assert not any(one.certain for one in found.values())


@pytest.mark.parametrize("source", NONE)
def test_no_evidence(source: str) -> None:
    assert stacks_named([source]) == {}


def test_a_handler_that_is_not_for_imports_leaves_it_certain() -> None:
    source = "try:\n    import torch_xla\nfinally:\n    print('x')"
    assert stacks_named([source])["xla"].certain


def test_certain_evidence_comes_before_weak_evidence_above_it() -> None:
    weak = "try:\n    import torch_xla\nexcept ImportError: pass"
    cells = [weak, "x = 1", "\n# here\nmodel.to('xla')\nmodel.to('tpu')"]
    assert stacks_named(cells) == {
        "xla": StackEvidence(2, 3, 'to("xla")', True),
        "torchtpu": StackEvidence(2, 4, 'to("tpu")', True),
    }


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        (["import torch_xla", "model.to('tpu')\nmodel.cuda()"], "xla"),
        (["model.to('tpu')", "try:\n    import torch_xla\nexcept ImportError: pass"], "torchtpu"),
        (["dist.init_process_group('gloo')"], "torch"),
        (["model.cuda()"], None),
        (["dist.init_process_group()"], None),
        (["if USE_TPU:\n    import torch_xla"], "xla"),
        (["x = 1"], None),
    ],
)
def test_the_stack_whose_rules_apply(cells: list[str], stack: BackendName | None) -> None:
    assert written_for(cells) == stack


@pytest.mark.parametrize(
    ("cells", "cpu"),
    [
        (["dist.init_process_group('gloo')\nx = torch.ones(2)"], True),
        (["torch.cuda.manual_seed(1)", "dist.init_process_group(backend='gloo')"], True),
        (["dist.init_process_group()"], False),
        (["device = 'cuda' if torch.cuda.is_available() else 'cpu'", "i = 'gloo'"], False),
        (["dist.init_process_group('gloo')", "model.cuda()"], False),
        (["dist.init_process_group('gloo' if cpu else 'nccl')"], False),
        (["dist.init_process_group('cpu:gloo,cuda:nccl')"], False),
        (["dist.init_process_group('gloo')", "from accelerate import Accelerator"], False),
        (["dist.init_process_group('gloo')", "torch.accelerator.current_accelerator()"], False),
    ],
)
def test_what_trains_on_the_cpu_where_there_is_a_gpu(cells: list[str], cpu: bool) -> None:
    assert names_cpu_only(cells) is cpu
