"""Notebooks that violate each rule, and near misses that do not.

`# <-` marks the lines that the rule must report.
"""

from __future__ import annotations

IMPORTS = """
import torch, torch_xla
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler
"""

TORCHTPU = """
import os, torch, torch_tpu
import torch.distributed as dist
from torch.utils.data import DataLoader
"""

TPU_GROUP = "dist.init_process_group('tpu_dist')\n"
BOTH_GROUPS = "dist.init_process_group('cpu:gloo,tpu:tpu_dist')\n"

LOOP = """
def train(index):
    device = torch_xla.device()
    model = nn.Linear(2, 2).to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(pl.MpDeviceLoader(loader, device)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        {1}
{0}
"""
REDUCE = "xm.optimizer_step(optimizer)"

TRAIN = "%%tpu_train\ntorch_xla.launch(train)"
ONE_CORE = "%%tpu_train --cores 1\ntorch_xla.launch(train)"
MODEL = "model = nn.Linear(2, 2)"
SGD = "optimizer = optim.SGD(model.parameters(), lr=0.1)"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1)"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
LOADER = "loader = DataLoader(train_data, 8, shuffle=True, drop_last=True)"
STEP = """
device = torch_xla.device()
for x, y in loader:{0}
    model(x.to(device)).sum().backward()
    {1}
"""

ACCELERATED = """
from accelerate import Accelerator, notebook_launcher
def train():
    accelerator = Accelerator()
    for batch in loader:
        loss = model(batch)
        accelerator.backward(loss)
        pass
"""

LIGHTNING = """
import lightning as L
class Net(L.LightningModule):
    def training_step(self, batch, i):
        loss = self(batch)
        {0}
        return loss
"""

FIT = "trainer = L.Trainer(accelerator='tpu')\ntrainer.fit(Net(), loader)"

IGNITE = """
import torch_xla
from ignite.engine import Engine
device = torch_xla.device()
def update(engine, batch):
    loss = model(batch)
    loss.backward()
    return {0}
"""

HF_ARGUMENTS = "arguments = transformers.TrainingArguments({0})"
HF_TRAIN = "%%tpu_train\ntransformers.Trainer(model, arguments).train()"

NET = "class Net(nn.Module):\n    def forward(self, x):\n        {0}"
SPMD_CELL = "%%tpu_train\nxr.use_spmd()"


def loop(*lines: str, reduce: str = REDUCE) -> str:
    """The training function, with lines at the end of the step."""
    return LOOP.format("\n".join(f"        {line}" for line in lines), reduce)


Cells = tuple[str, ...]
Pair = tuple[list[Cells], list[Cells]]

EXAMPLES: dict[str, Pair] = {
    "not-python": (
        [("x = = 1  # <-", "%%tpu_train\nprint(x)")],
        [("%%bash\nx = = 1", "%%tpu_train\nprint(1)"), ("# tpu: skip\nx = = 1", "%%tpu_train\n1")],
    ),
    "debugger": (
        [
            ("def f():\n    breakpoint()  # <-", "%%tpu_train\nf()"),
            ("import pdb", "%%tpu_train\nx = 1\nif x:\n    pdb.set_trace()  # <-"),
            ("import tpunb", "def f():\n    breakpoint()  # <-\ntpunb.launch(f)"),
        ],
        [
            ("breakpoint()",),
            ("%%tpu_debug\nbreakpoint()", "%%tpu_train\nprint(1)"),
            ("def breakpoint():\n    pass", "%%tpu_train\nbreakpoint()"),
            ("%%tpu_train\nprint(1)", "breakpoint()"),
        ],
    ),
    "undefined-name": (
        [
            ("model = Net()  # <-",),
            ("x = 1", "%%tpu_train\nprint(x, y)  # <-"),
            ("# import torch\n\ndef f():\n    return torch.ones(1)  # <-", "%%tpu_train\nf()"),
            ("def f(x: Tensor):  # <-\n    return x",),
            ("print(later)  # <-", "later = 1"),
            ("!ls\nprint(_exit_code)  # <-", "%%tpu_train\n1"),
            ("%matplotlib inline\nplt.plot([1])  # <-",),
            ("import tpunb", "def f(x):\n    return x * scale  # <-\ntpunb.launch(f, (1,))"),
            ("device = xm.xla_device()  # <-",),
        ],
        [
            ("%%tpu_train\n!ls\nprint(_exit_code)",),
            ("def f():\n    return later", "later = 1", "%%tpu_train\nf()"),
            ("from lib import *", "model = Net()"),
            ("%run other.py", "model = Net()"),
            ("%tpu_attach far", "print(weights)"),
            ("%%cython\ncdef int f(int x):\n    return x", "print(f(1))"),
            ("%store -r data", "print(data)"),
            ("# tpu: skip\nx = 1", "%%tpu_train\nprint(x)"),
            ("from __future__ import annotations\ndef f(x: Tensor) -> Tensor: pass",),
            ("try:\n    unicode\nexcept NameError:\n    unicode = str",),
            ("display(get_ipython())\n_", "print(In, Out, _1, __name__, __file__)"),
        ],
    ),
    "not-returned": (
        [
            ("%%tpu_train\nlosses = [1]", "print(losses)  # <-"),
            ("%%tpu_train --out r\nx = 1", "r.state\ny = x + 1  # <-", "%%tpu_train\ny"),
            ("%%tpu_train\nx = 1", "%%tpu_train\nprint(x)  # <-"),
            ("net = Net()", "%%tpu_train\nSGD(net.parameters())", "net.eval()  # <-"),
            (
                "import lightning as L\nnet = Net()",
                "%%tpu_train\ntrainer = L.Trainer()\ntrainer.fit(net, loader)",
                "print(net(x))  # <-",
            ),
            (
                "import transformers\nmodel = make()\ntrainer = transformers.Trainer(model)",
                "%%tpu_train\ntrainer.train()\ntrainer.save_model('out')",
                "trainer.evaluate()  # <-",
            ),
            (
                "import transformers\nmodel = make()",
                "%%tpu_train\ntrainer = transformers.Trainer(model=model)\ntrainer.train()",
                "model(x)  # <-\ntrainer.evaluate()  # <-",
            ),
            (
                "import fastai.learner as fl\nlearn = fl.Learner(d, m)",
                "%%tpu_train\nlearn.fit_one_cycle(1)",
                "learn.show_results()  # <-",
            ),
            (
                "import torch_xla.core.xla_model as xm\nfrom torch import optim\n"
                "net = Net()\nopt = optim.SGD(net.parameters())",
                "%%tpu_train\nfor x in rows:\n    net(x).backward()\n    xm.optimizer_step(opt)",
                "net.eval()  # <-",
            ),
            (
                "import torch_xla\nnet = Net()",
                "def train(index, model):\n    model = model.to(d)\n    SGD(model.parameters())",
                "%%tpu_train\ntorch_xla.launch(train, args=(net,))",
                "net(x)  # <-",
            ),
            ("losses = []", "%%tpu_train\nlosses.append(1)", "plot(losses)  # <-"),
            ("stats = {}", "def f():\n    stats['x'] = 1", "%%tpu_train\nf()", "stats  # <-"),
        ],
        [
            ("losses = []", "%%tpu_train --returns losses\nlosses.append(1)", "plot(losses)"),
            ("losses = []", "%%tpu_train\nlosses.append(1)", "losses = [1]\nplot(losses)"),
            ("losses = []", "def f(losses):\n    losses.append(1)", "%%tpu_train\nf([])", "losses"),
            (
                "net = Net()",
                "%%tpu_train --returns state\nSGD(net.parameters())\nstate = net.state_dict()",
                "net",
            ),
            (
                "import lightning as L\nnet = Net()",
                "%%tpu_train\ntrainer = L.Trainer()\ntrainer.fit(net)\n"
                "trainer.save_checkpoint('a')",
                "net = Net.load_from_checkpoint('a')\nnet(x)",
            ),
            ("%%tpu_train --returns losses\nlosses = [1]", "print(losses)"),
            ("%%tpu_train --returns {names}\nx = 1", "print(x)"),
            ("%run other.py", "%%tpu_train\nx = 1", "print(x)"),
            ("%%tpu_train\nx = 1", "def f(x):\n    return x", "lambda x: x"),
            ("%%tpu_train\nx = 1", "%%tpu_train\nx = 2\nprint(x)"),
            ("net = 1", "%%tpu_train\nnet.parameters()", "net.load_state_dict(1)\nnet"),
        ],
    ),
    "retired-name": (
        [
            (IMPORTS, "n = xm.get_log_fn()  # <-"),
            ("from torch_xla.core.xla_model import get_log_fn  # <-",),
            ("import torch_xla.distributed.xla_dist as xd  # <-",),
            ("from torch_xla.core.xla_model import *", "n = get_log_fn()  # <-"),
            (IMPORTS, "n = getattr(xm, 'get_log_fn')()  # <-"),
            ("import lightning as L", "L.Trainer(max_epochs=1, tpu_cores=8)  # <-"),
            ("import lightning.pytorch as pl", "pl.Trainer(\n    tpu_cores=1,  # <-\n)"),
            ("from transformers import AutoModel, AdamW  # <-", "AdamW([])"),
            ("import numpy as np", "best = np.Inf  # <-"),
        ],
        [
            ("import numpy as np", "best = np.inf + np.float64(1)\nnp.random.Inf"),
            ("!pip install numpy==1.26\nimport numpy as np", "best = np.Inf"),
            ("from other import Trainer", "Trainer(tpu_cores=8)"),
            (
                "!pip install pytorch-lightning==1.5",
                "import lightning as L",
                "L.Trainer(tpu_cores=8)",
            ),
            ("try:\n    from transformers import AdamW\nexcept ImportError:\n    AdamW = None",),
            ("from torch_xla.core.xla_model import *\nfrom helpers import *", "get_log_fn()"),
            ("from torch_xla.core.xla_model import *\ndef f(get_log_fn):\n    get_log_fn()",),
            (IMPORTS, "n = getattr(xm, 'get_log_fn', xr.global_ordinal)()"),
            (IMPORTS, "def f(xm):\n    return xm.get_log_fn()"),
            (IMPORTS, "try:\n    n = xm.xrt_world_size()\nexcept AttributeError:\n    n = 1"),
            (IMPORTS, "n = xm.xrt_world_size() if hasattr(xm, 'xrt_world_size') else 1"),
        ],
    ),
    "old-name": (
        [(IMPORTS, "xm.mark_step()  # <-\nxm.mark_step()")],
        [(IMPORTS, "torch_xla.sync()"), ("class xm:\n    pass", "xm.mark_step()")],
    ),
    "shell-export": (
        [("!export XLA_FLAGS=1  # <-".replace("  # <-", ""),)],
        [
            ("%env XLA_FLAGS=1",),
            ("!export A=1; python x.py",),
            ("%%bash\nexport A=1\npython x.py",),
        ],
    ),
    "bf16-variable": (
        [
            ("import os\nos.environ['XLA_USE_BF16'] = '1'  # <-",),
            ("import os\nos.environ.update(XLA_DOWNCAST_BF16='1')  # <-",),
            ("%env XLA_USE_BF16=1",),
            ("!XLA_USE_BF16=1 python train.py",),
        ],
        [
            ("import os\nos.environ['XLA_USE_BF16'] = '0'",),
            ("env = {}\nenv['XLA_USE_BF16'] = '1'",),
        ],
    ),
    "retired-variable": (
        [
            ("import os\nos.environ['XRT_TPU_CONFIG'] = 'a;0;b'  # <-",),
            ("%env XRT_WORKERS=2",),
            ("import os\nassert os.environ['COLAB_TPU_ADDR']  # <-",),
        ],
        [
            ("import os\nos.environ['PJRT_DEVICE'] = 'TPU'",),
            ("import os\nprint(os.environ.get('COLAB_TPU_ADDR'))",),
        ],
    ),
    "retired-command": (
        [
            ("!python pytorch-xla-env-setup.py --version nightly",),
            ("%%bash\npip install cloud-tpu-client==0.10",),
        ],
        [("!pip install timm",), ("# !python env-setup.py",)],
    ),
    "half-a-pair": (
        [
            ("!pip install torch==2.0.0 torchvision  # <-",),
            ("!pip install torch==2.5.0  # <-\n!pip install torch_xla==2.6.0  # <-",),
            ("%%bash\necho 1\npip install https://h/torch-nightly-cp38-linux.whl  # <-",),
        ],
        [
            ("!pip install torch==2.6.0 'torch_xla[tpu]==2.6.0'",),
            ("!pip install torch==2.6.0", "!pip install torch_xla==2.6.0"),
            ("!pip install torch==2.9.0",),
            ("# !pip install torch==2.0.0",),
        ],
    ),
    "tensorflow-import": (
        [
            (IMPORTS, "import tensorflow as tf  # <-"),
            (IMPORTS, "from tensorflow import keras  # <-"),
        ],
        [("import tensorflow as tf",), (IMPORTS, "# tpu: skip\nimport tensorflow", TRAIN)],
    ),
    "tracker-above": (
        [
            ("import wandb\nwandb.init()  # <-", TRAIN),
            ("from mlflow import start_run\nwith start_run() as run:  # <-\n    x = 1", TRAIN),
        ],
        [
            ("# tpu: skip\nimport wandb\nwandb.init()", TRAIN),
            ("import wandb\ndef begin():\n    wandb.init()", f"{TRAIN}\nbegin()"),
            ("import wandb", f"{TRAIN}\nwandb.init()"),
            ("import wandb\nwandb.init()",),
        ],
    ),
    "tpu-taken": (
        [
            (IMPORTS, "import jax\nprint(jax.devices())  # <-"),
            (IMPORTS, "import tensorflow as tf\ntf.distribute.TPUStrategy(r)  # <-"),
        ],
        [
            ("import jax\nprint(jax.devices())",),
            (IMPORTS, "%env JAX_PLATFORMS=cpu", "import jax\nprint(jax.devices())"),
        ],
    ),
    "nprocs": (
        [
            (IMPORTS, loop(), "xmp.spawn(train, nprocs=8, start_method='fork')  # <-"),
            (IMPORTS, loop(), "n = 8\nxmp.spawn(train, (), n, start_method='fork')  # <-"),
            (IMPORTS, loop(), "F = {'n': 8}\nxmp.spawn(train, nprocs=F['n'])  # <-"),
        ],
        [
            (IMPORTS, loop(), "xmp.spawn(train, nprocs=1)"),
            (IMPORTS, loop(), "n = None\nxmp.spawn(train, nprocs=n, start_method='fork')"),
            (IMPORTS, loop(), "F = {'n': 8}\nF['n'] = x\nxmp.spawn(train, nprocs=F['n'])"),
            (IMPORTS, loop(), "%%tpu_train\nxmp.spawn(train, nprocs=8)"),
        ],
    ),
    "spawn-from-notebook": (
        [
            (IMPORTS, loop(), "torch_xla.launch(train)  # <-"),
            (IMPORTS, loop(), "xmp.spawn(train, start_method='spawn')  # <-"),
        ],
        [
            (IMPORTS, loop(), TRAIN),
            (IMPORTS, loop(), "torch_xla.launch(train, start_method='fork')"),
            (IMPORTS, "from mine import train", "torch_xla.launch(train)"),
            (IMPORTS, loop(), "torch_xla.launch(train, debug_single_process=True)"),
        ],
    ),
    "device-before-ranks": (
        [
            (IMPORTS, "device = xm.xla_device()  # <-", loop(), "xmp.spawn(train)"),
            (IMPORTS, "x = torch.ones(2, device='xla')  # <-", loop(), TRAIN),
        ],
        [
            (IMPORTS, loop(), "xmp.spawn(train)", "device = xm.xla_device()"),
            (IMPORTS, "%%tpu_debug\ndevice = xm.xla_device()", loop(), TRAIN),
            (IMPORTS, "device = xm.xla_device()"),
        ],
    ),
    "device-number": (
        [
            (IMPORTS, "def f(i):\n    return xm.xla_device(i)  # <-", "xmp.spawn(f)"),
            (IMPORTS, "%%tpu_train\ndevice = torch_xla.device(3)  # <-"),
        ],
        [
            (IMPORTS, "def f(i):\n    return xm.xla_device()", "xmp.spawn(f)"),
            (IMPORTS, "device = torch_xla.device(3)"),
            (IMPORTS, "%%tpu_train\ndevice = torch_xla.device(0)"),
        ],
    ),
    "accelerator-before-ranks": (
        [(ACCELERATED, "accelerator = Accelerator()  # <-", "notebook_launcher(train)")],
        [(ACCELERATED, "notebook_launcher(train)")],
    ),
    "processes-on-tpu": (
        [(ACCELERATED, "notebook_launcher(train, num_processes=8)  # <-")],
        [
            (ACCELERATED, "notebook_launcher(train)"),
            (ACCELERATED, "%%tpu_train\nnotebook_launcher(train, num_processes=8)"),
        ],
    ),
    "spmd-launch": (
        [
            (IMPORTS, "def f(i): ...", SPMD_CELL + "\ntorch_xla.launch(f)  # <-"),
            (IMPORTS, SPMD_CELL + "\ndist.init_process_group('xla', init_method='xla://')  # <-"),
        ],
        [
            (IMPORTS, "def f(i):\n    xr.use_spmd()", "%%tpu_train\ntorch_xla.launch(f)"),
            (IMPORTS, "if spmd:\n    xr.use_spmd()", "%%tpu_train\ntorch_xla.launch(f)"),
            (IMPORTS, SPMD_CELL, "%%tpu_train\ntorch_xla.launch(f)"),
            (IMPORTS, SPMD_CELL + "\ndist.init_process_group('gloo')"),
        ],
    ),
    "cuda-call": (
        [
            (IMPORTS, "model = nn.Linear(2, 2).cuda()  # <-"),
            (IMPORTS, "device = 'cuda'", "model.to(device)  # <-"),
            (IMPORTS, "x = torch.ones(2, device=torch.device('cuda:0'))  # <-"),
            (IMPORTS, "torch.cuda.synchronize()  # <-"),
            (IMPORTS, "loss = nn.CrossEntropyLoss(weight=w)\nloss.cuda()  # <-"),
            (IMPORTS, "dist.init_process_group('nccl')  # <-"),
        ],
        [
            (IMPORTS, "loss_fn = nn.CrossEntropyLoss().cuda()\nnn.ReLU().to('cuda')"),
            (IMPORTS, "criterion = nn.MSELoss(reduction='sum')\ncriterion = criterion.cuda()"),
            (IMPORTS, "if torch.cuda.is_available():\n    model.cuda()"),
            (IMPORTS, "device = 'cuda' if torch.cuda.is_available() else 'cpu'", "m.to(device)"),
            (IMPORTS, "torch.cuda.empty_cache()\ntorch.cuda.manual_seed_all(1)"),
            (IMPORTS, "if use_tpu:\n    d = xm.xla_device()\nelse:\n    d = 'cuda'\nm.to(d)"),
            (IMPORTS, "try:\n    m.cuda()\nexcept RuntimeError:\n    pass"),
            (IMPORTS, "if gpu:\n    dist.init_process_group(backend='nccl')"),
        ],
    ),
    "fp16": (
        [
            (ACCELERATED, "Accelerator(mixed_precision='fp16')  # <-\nnotebook_launcher(train)"),
            ("import lightning as L", "%%tpu_train\nL.Trainer(precision='16-mixed')  # <-"),
            (
                "import transformers",
                "%%tpu_train\ntransformers.TrainingArguments('a', fp16=True)  # <-",
            ),
        ],
        [
            ("from accelerate import Accelerator", "Accelerator(mixed_precision='fp16')"),
            ("import lightning as L", "%%tpu_train\nL.Trainer(precision='bf16-true')"),
        ],
    ),
    "cuda-amp": (
        [
            (IMPORTS, "with torch.cuda.amp.autocast():  # <-\n    y = model(x)"),
            (IMPORTS, "scaler = torch.amp.GradScaler('cuda')  # <-"),
        ],
        [
            (IMPORTS, "with torch.autocast('xla', dtype=torch.bfloat16):\n    y = model(x)"),
            (IMPORTS, "s = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())"),
            (IMPORTS, "amp = device.type == 'cuda'\ntorch.cuda.amp.autocast(amp)"),
            ("import torch\nscaler = torch.cuda.amp.GradScaler()",),
        ],
    ),
    "fused-optimizer": (
        [
            (IMPORTS, "o = optim.AdamW(m.parameters(), fused=True)  # <-"),
            ("import transformers", HF_ARGUMENTS.format("'out'") + "  # <-", HF_TRAIN),
            (
                "import transformers",
                HF_ARGUMENTS.format("optim='adamw_torch_fused'  # <-\n"),
                HF_TRAIN,
            ),
        ],
        [
            ("import transformers", HF_ARGUMENTS.format("optim='adafactor'"), HF_TRAIN),
            ("import transformers", HF_ARGUMENTS.format("**given"), HF_TRAIN),
            (
                "!pip install 'transformers<5'",
                "import transformers",
                HF_ARGUMENTS.format(1),
                HF_TRAIN,
            ),
            ("import torch\no = torch.optim.AdamW(m.parameters(), fused=True)",),
        ],
    ),
    "data-parallel": (
        [(IMPORTS, "model = nn.DataParallel(model)  # <-")],
        [
            (IMPORTS, "if torch.cuda.device_count() > 1:\n    model = nn.DataParallel(model)"),
            ("from torch import nn\nmodel = nn.DataParallel(model)",),
        ],
    ),
    "compile-backend": (
        [(IMPORTS, "device = torch_xla.device()\nmodel = torch.compile(model)  # <-")],
        [
            (IMPORTS, "device = torch_xla.device()\nm = torch.compile(m, backend='openxla')"),
            ("import torch\nmodel = torch.compile(model)",),
        ],
    ),
    "no-step-sync": (
        [
            (IMPORTS, STEP.format("  # <-", "optimizer.step()")),
            (IMPORTS, f"def finish():\n    {REDUCE}", STEP.format("  # <-", "finish()")),
        ],
        [
            (IMPORTS, STEP.format("", "optimizer.step()\n    torch_xla.sync()")),
            (
                IMPORTS,
                "loader = pl.MpDeviceLoader(rows, torch_xla.device())",
                STEP.format("", REDUCE),
            ),
            (IMPORTS, STEP.format("", "with torch_xla.step():\n        optimizer.step()")),
            (
                IMPORTS + "from tpunb.training import Accumulation",
                STEP.format("", "a.step()"),
                "a = Accumulation(optimizer, 4)",
            ),
            (
                IMPORTS + "import torch_xla.distributed.data_parallel as dp",
                "def train(model, loader, device, context):\n    for x, y in loader:\n"
                "        model(x).sum().backward()\n        xm.optimizer_step(optimizer)",
                "dp.DataParallel(Net, device_ids=xm.get_xla_supported_devices())(train, loader)",
            ),
        ],
    ),
    "host-sync-in-step": (
        [
            (IMPORTS, loop("total += loss.item()  # <-"), TRAIN),
            (IMPORTS, loop("print(f'loss {loss}')  # <-"), TRAIN),
            (IMPORTS, loop("history.append(float(loss))  # <-"), TRAIN),
            (IMPORTS, loop("m = xm.mesh_reduce('loss', loss, sum)  # <-"), TRAIN),
            (ACCELERATED.replace("pass", "print(loss)  # <-"), "notebook_launcher(train)"),
            (LIGHTNING.format("self.log('loss', loss.item())  # <-"), FIT),
            (IGNITE.format("loss.item()  # <-"), "trainer = Engine(update)\ntrainer.run(loader)"),
        ],
        [
            (IMPORTS, loop("if step % 100 == 0:", "    print(loss.item())"), TRAIN),
            (ACCELERATED.replace("pass", "print(loss)"), "train()"),
            (LIGHTNING.format("self.log('loss', loss)"), FIT),
            (LIGHTNING.format("print(loss.item())"), FIT.replace("accelerator='tpu'", "")),
            (IMPORTS, loop("if step % 100:", "    continue", "print(loss.item())"), TRAIN),
            (IMPORTS, loop("total += loss.detach()"), TRAIN),
            (IMPORTS, loop("xm.add_step_closure(print, args=(loss,))"), TRAIN),
            (IMPORTS, loop() + "    print(loss.item())", TRAIN),
            (IMPORTS, "import numpy", loop("share = numpy.mean(x)", "print(share.item())"), TRAIN),
        ],
    ),
    "no-gradient-reduction": (
        [
            (IMPORTS, loop(reduce="optimizer.step()  # <-"), TRAIN),
            (
                IMPORTS,
                "%%tpu_train\nfor x in loader:\n    model(x).sum().backward()\n"
                "    opt.step()  # <-\n    total = xm.all_reduce('sum', loss)",
                "%%tpu_train\nfor x in loader:\n    xm.optimizer_step(opt)",
            ),
        ],
        [
            (IMPORTS, loop("scheduler.step()"), TRAIN),
            (IMPORTS, loop(reduce="xm.reduce_gradients(o)\n        optimizer.step()"), TRAIN),
            (IMPORTS, loop(reduce="optimizer.step()"), ONE_CORE),
            (IMPORTS, loop(reduce="optimizer.step()"), "train(0)"),
            (
                IMPORTS + "from mine import average_gradients",
                loop(reduce="average_gradients(model)\n        optimizer.step()"),
                TRAIN,
            ),
            (
                IMPORTS,
                "class Fit:\n    def __init__(self):\n        self.model = DDP(net)\n"
                "    def step(self, x):\n        self.model(x).backward()\n"
                "        self.optimizer.step()",
                "%%tpu_train\nfit = Fit()\nfor x in loader:\n    fit.step(x)",
            ),
        ],
    ),
    "clip-before-reduction": (
        [(IMPORTS, loop(reduce=f"{CLIP}  # <-\n        {REDUCE}"), TRAIN)],
        [
            (IMPORTS, loop(reduce=f"xm.reduce_gradients(optimizer)\n        {CLIP}"), TRAIN),
            (IMPORTS, loop(reduce=f"{CLIP}\n        {REDUCE}"), ONE_CORE),
        ],
    ),
    "torch-checkpoint": (
        [
            (
                IMPORTS + "from torch.utils.checkpoint import checkpoint",
                "def forward(x):\n    return checkpoint(layer, x.to('xla'))  # <-",
            ),
            (
                IMPORTS + "from transformers import AutoModel",
                "model.gradient_checkpointing_enable()  # <-\nmodel.to(torch_xla.device())",
            ),
            (
                "import transformers",
                HF_ARGUMENTS.format("gradient_checkpointing=True") + "  # <-",
                HF_TRAIN,
            ),
        ],
        [
            (
                IMPORTS,
                "try:\n    from torch_xla.utils.checkpoint import checkpoint\n"
                "except ImportError:\n    from torch.utils.checkpoint import checkpoint",
                "checkpoint(layer, x.to('xla'))",
            ),
            (IMPORTS + "from torch.utils.checkpoint import checkpoint", "checkpoint(layer, x)"),
        ],
    ),
    "optimizer-before-device": (
        [(IMPORTS, f"{MODEL}\n{SGD}  # <-\nmodel.to(torch_xla.device())")],
        [
            (IMPORTS, f"{MODEL}\nmodel.to(torch_xla.device())\n{SGD}"),
            (IMPORTS, f"{MODEL}\n{SGD}\nmodel.to('cpu')"),
            (IMPORTS, f"{MODEL}.to(torch_xla.device())\n{SGD}", "model.to(torch_xla.device())"),
        ],
    ),
    "changing-shape": (
        [
            (IMPORTS, loop("kept = loss[x > 0]  # <-"), TRAIN),
            (IMPORTS, loop("x = x.to('xla')", "kept = x[x > 0]  # <-"), TRAIN),
            (IMPORTS, loop("rows = torch.nonzero(x)  # <-"), TRAIN),
            (IMPORTS, NET.format("return torch.unique(x)  # <-")),
        ],
        [
            (IMPORTS, loop("kept = torch.where(x > 0, loss, 0)"), TRAIN),
            (IMPORTS, "rows = torch.nonzero(x)"),
            (IMPORTS, loop("first = x[0]"), TRAIN),
        ],
    ),
    "dynamic-padding": (
        [
            (IMPORTS, "import transformers\ntransformers.DataCollatorWithPadding(tokenizer)  # <-"),
            (IMPORTS, "def collate(rows):\n    return tokenizer(rows, padding=True)  # <-"),
        ],
        [
            (IMPORTS, "import transformers\ntransformers.DataCollatorWithPadding(t, max_length=9)"),
            (IMPORTS, "def c(rows):\n    return tokenizer(rows, padding='max_length')"),
            ("def collate(rows):\n    return tokenizer(rows, padding=True)",),
        ],
    ),
    "collective-on-some-ranks": (
        [
            (IMPORTS, "%%tpu_train\nif xm.is_master_ordinal():\n    xm.save({}, 'm.pt')  # <-"),
            *(
                (IMPORTS, f"%%tpu_train --cores 8\nif {test}:\n    xm.rendezvous('x')  # <-")
                for test in (
                    *("xm.is_master_ordinal()", "rank >= 1", "0 < rank", "rank in (0, 1, 2, 3)"),
                    *("rank in range(4)", "rank == xr.world_size() - 1", "rank % 2", "not rank"),
                    *("rank >= 0 and rank < 4", "rank == 0 and best", "is_main_process"),
                    *("xr.world_size() == 1 or rank == 0", "xr.world_size() > 1 and rank == 0"),
                )
            ),
            (IMPORTS, "%%tpu_train\nif rank in (0, 1, 2, 3):\n    xm.rendezvous('x')  # <-"),
            (IMPORTS, "%%tpu_train\nr = xr.global_ordinal()\nif r < 4:\n    dist.barrier()  # <-"),
            (
                IMPORTS,
                "def f(i):\n    if i == 0:\n        xm.rendezvous('x')  # <-",
                "xmp.spawn(f)",
            ),
            (
                IMPORTS,
                "%%tpu_train\nif rank == 0:\n    xm.rendezvous('x')  # <-\n"
                "elif rank == 1:\n    xm.rendezvous('x')  # <-",
            ),
        ],
        [
            *(
                (IMPORTS, f"%%tpu_train --cores=8\nif {test}:\n    xm.rendezvous('x')")
                for test in (
                    *("rank >= 0", "0 <= xr.global_ordinal()", "rank < 8", "rank is not None"),
                    *("not rank < 0 and epoch % 2 == 0", "rank in (7, 0, 1, 2, 3, 4, 5, 6)"),
                    *("rank in range(8) and rank != 9", "rank not in {0, 1, 2, 3, 4, 5, 6, 7}"),
                    *("rank < xr.world_size()", "rank <= dist.get_world_size() - 1"),
                    *("rank in range(world_size)", "rank in list(range(0, world_size))"),
                    *("world_size == 1 and rank == 0", "not (xr.world_size() > 1 or rank != 0)"),
                    *("xr.world_size() > 1", "local_rank != -1"),
                )
            ),
            (
                IMPORTS,
                "%%tpu_train\nif xr.world_size() > 1:\n    pass\nelse:\n"
                "    if rank == 0:\n        xm.rendezvous('x')",
            ),
            (
                IMPORTS,
                "%%tpu_train\nmembers = [*range(xr.world_size())]\n"
                "if rank in members:\n    xm.rendezvous('x')",
            ),
            (
                IMPORTS,
                "%%tpu_train\nif not xm.is_master_ordinal():\n    xm.rendezvous('download')\n"
                "load()\nif xm.is_master_ordinal():\n    xm.rendezvous('download')",
            ),
            (
                IMPORTS,
                "%%tpu_train\nif rank == 0:\n    xm.rendezvous('x')\nelse:\n    xm.rendezvous('x')",
            ),
            (IMPORTS, "%%tpu_train\nif xm.is_master_ordinal():\n    xm.rendezvous('x', b'', [0])"),
            (IMPORTS, "%%tpu_train\nif dist.get_rank() < 2:\n    dist.all_reduce(x, group=g)"),
        ],
    ),
    "step-skipped": (
        [
            (
                IMPORTS,
                loop(reduce=f"if torch.isnan(loss):\n            continue  # <-\n        {REDUCE}"),
                TRAIN,
            )
        ],
        [
            (IMPORTS, loop("if step == 10:", "    break"), TRAIN),
            (IMPORTS, loop("if loss.item() < 0.1:", "    break"), TRAIN),
        ],
    ),
    "summed-gradients": (
        [
            (IMPORTS, "%%tpu_train\ng = [p.grad for p in ps]\nxm.all_reduce('sum', g)  # <-"),
            (IMPORTS, "%%tpu_train\nfor p in net.parameters():\n    dist.all_reduce(p.grad)  # <-"),
        ],
        [
            (IMPORTS, "%%tpu_train\nxm.all_reduce(xm.REDUCE_SUM, [p.grad], scale=1 / n)"),
            (
                IMPORTS,
                "def step():\n    dist.all_reduce(p.grad)",
                "def lose(x):\n    return model(x) / xr.world_size()",
                "%%tpu_train\nlose(x)\nstep()",
            ),
            (IMPORTS, "%%tpu_train\nxm.all_reduce('sum', total)"),
            (IMPORTS, "%%tpu_train --cores 1\ndist.all_reduce(p.grad)"),
        ],
    ),
    "file-of-all-ranks": (
        [
            (
                IMPORTS,
                "path = 'a'\ndef f(i):\n    open(path, 'a')  # <-",
                "%%tpu_train\ntorch_xla.launch(f)",
            ),
            (IMPORTS, "%%tpu_train\ntorch.save(model.cpu().state_dict(), 'm.pt')  # <-"),
            (IMPORTS, "def f(i):\n    open('a', 'w')  # <-", "torch_xla.launch(f)"),
            (IMPORTS, "path = 'a'", "%%tpu_train\nif x:\n    y\n!cp {path} out/  # <-"),
            (IMPORTS, "def f():\n    !echo done >> log.txt  # <-", "%%tpu_train\nf()"),
            (IMPORTS, "%%tpu_train\nget_ipython().run_cell_magic('bash', '', 'rm a')  # <-"),
        ],
        [
            (IMPORTS, "%%tpu_train\nif rank == 0:\n    open('a', 'w')"),
            (IMPORTS, "%%tpu_train\nif should_write():\n    open('a', 'w')"),
            (IMPORTS, "%%tpu_train\nopen(f'{rank}.txt', 'w')\nopen('data.txt')"),
            (IMPORTS, "%%tpu_train --cores 1\nopen('a', 'w')"),
            (IMPORTS, "def f():\n    if x: return\n    open('a', 'w')", "%%tpu_train\nf()"),
            (IMPORTS, "@rank_zero_only\ndef f():\n    open('a', 'w')", "%%tpu_train\nf()"),
            (IMPORTS, "%%tpu_train\nxm.save({}, 'm.pt')"),
            (IMPORTS, "!cp a b", "%%tpu_train\nif rank == 0:\n    !cp a b\n!ls; nvidia-smi 2>&1"),
            (IMPORTS, "%%tpu_train\n!cp a {rank}\n!touch $RANK\n!mkdir -p a\n!ls > /dev/null"),
            (IMPORTS, "%%tpu_train --cores 1\n!rm a"),
            (IMPORTS, "%%tpu_train\nout = f'{rank}.pt'\n!cp a {out}"),
        ],
    ),
    "last-batch": (
        [
            (IMPORTS, "loader = DataLoader(train_data, batch_size=8, shuffle=True)  # <-", loop()),
            (IMPORTS, "loader = DataLoader(data, 8, sampler=sampler)  # <-", loop()),
        ],
        [
            (IMPORTS, "loader = DataLoader(train_data, 8, shuffle=True, drop_last=True)", loop()),
            (IMPORTS, "loader = DataLoader(val_data, batch_size=8)", loop()),
            (IMPORTS, "shown = DataLoader(train_data, 4)\nx = next(iter(shown))", loop()),
            (IMPORTS, "loader = DataLoader(train_data, shuffle=True)", loop()),
            (IMPORTS, "made = DataLoader(train_data, 8, True)\nloader = shard(made)", loop()),
        ],
    ),
    "no-sampler": (
        [(IMPORTS, f"{LOADER}  # <-", loop(), TRAIN)],
        [
            (IMPORTS, "l = DataLoader(d, 8, sampler=DistributedSampler(d))", loop(), TRAIN),
            (IMPORTS, LOADER, loop(), "train(0)"),
            (IMPORTS, LOADER.replace("train_data", "Rows(xr.global_ordinal())"), loop(), TRAIN),
            (IMPORTS, "rows = rows[xr.global_ordinal() :: 8]", LOADER, loop(), TRAIN),
        ],
    ),
    "sampler-and-shuffle": (
        [
            (IMPORTS, "l = DataLoader(d, 8, shuffle=True, sampler=DistributedSampler(d))  # <-"),
            (IMPORTS, "s = DistributedSampler(d)\nDataLoader(d, shuffle=True, sampler=s)  # <-"),
        ],
        [
            (IMPORTS, "loader = DataLoader(d, 8, shuffle=False, sampler=DistributedSampler(d))"),
            (IMPORTS, "s = None\nloader = DataLoader(d, 8, shuffle=True, sampler=s)"),
        ],
    ),
    "set-epoch": (
        [(IMPORTS, "s = DistributedSampler(data)  # <-", loop(), TRAIN)],
        [
            (IMPORTS, "s = DistributedSampler(data)\ns.set_epoch(0)", loop(), TRAIN),
            (
                IMPORTS + "from tpunb.training import Position",
                "s = DistributedSampler(d)",
                loop(),
                TRAIN,
            ),
            (IMPORTS, "s = DistributedSampler(data, shuffle=False)", loop(), TRAIN),
            (IMPORTS, "s = DistributedSampler(val_data)", loop(), TRAIN),
        ],
    ),
    "unequal-batches": (
        [
            (IMPORTS, "%%tpu_train\npart = rows[rank :: xr.world_size()]  # <-"),
            (IMPORTS, "%%tpu_train\npart = Subset(rows, range(rank, n, xr.world_size()))  # <-"),
        ],
        [
            (IMPORTS, "%%tpu_train\npart = rows[rank * 8 : rank * 8 + 8]"),
            (IMPORTS, "%%tpu_train\nfor i in range(rank, n, world_size):\n    print(i)"),
            (
                IMPORTS,
                "%%tpu_train\nm = n // 8 * 8\npart = Subset(rows, range(rank, m, world_size))",
            ),
            (IMPORTS, "%%tpu_train\nr = xr.global_ordinal()\npart = rows[r::n].to(device)"),
        ],
    ),
    "many-workers": (
        [
            (IMPORTS, "loader = DataLoader(d, 8, num_workers=16)  # <-", loop(), TRAIN),
            (
                IMPORTS,
                "import os\nloader = DataLoader(d, num_workers=os.cpu_count())  # <-",
                loop(),
                TRAIN,
            ),
        ],
        [
            (IMPORTS, "loader = DataLoader(d, 8, num_workers=2)", loop(), TRAIN),
            (IMPORTS, "loader = DataLoader(d, 8, num_workers=16)", loop(), "train(0)"),
        ],
    ),
    "torch-save-on-xla": (
        [
            (IMPORTS, loop() + "    torch.save(model.state_dict(), 'm.pt')  # <-", TRAIN),
            (IMPORTS, loop() + "    model.save_pretrained('m')  # <-", TRAIN),
        ],
        [
            (IMPORTS, loop() + "    model.cpu()\n    model.save_pretrained('m')", TRAIN),
            (IMPORTS, loop() + "    xm.save(model.state_dict(), 'm.pt')", TRAIN),
            (
                IMPORTS,
                loop() + "    if USE_GPU:\n        torch.save(model.state_dict(), 'm.pt')",
                TRAIN,
            ),
        ],
    ),
    "load-to-xla": (
        [
            (IMPORTS, "d = torch_xla.device()\ntorch.load('m.pt', map_location=d)  # <-"),
            (IMPORTS, "s = torch.load('m.pt', map_location='xla')  # <-"),
        ],
        [
            (IMPORTS, "s = torch.load('m.pt', map_location='cpu')"),
            (IMPORTS, "s = torch.load('m.pt', map_location=device)"),
            (IMPORTS, "d = torch_xla.device()\ntorch.load('m', map_location='cpu' if tpu else d)"),
        ],
    ),
    "ddp-arguments": (
        [
            (IMPORTS, DDP, "m = DDP(m, gradient_as_bucket_view=True)  # <-"),
            (IMPORTS, DDP, "m = DDP(m, device_ids=[rank])  # <-"),
        ],
        [(IMPORTS, DDP, "DDP(m)\nDDP(m, device_ids=[0], gradient_as_bucket_view=False)")],
    ),
    "two-tpu-libraries": (
        [
            (IMPORTS, "import torch_tpu  # <-"),
            (IMPORTS, "from torch_tpu import x  # <-\ny = torch.ones(2).to('tpu')  # <-"),
            (IMPORTS, "with torch.autocast('tpu'):  # <-\n    pass"),
        ],
        [
            (IMPORTS, "try:\n    import torch_tpu\nexcept ImportError:\n    pass"),
            (IMPORTS, "x = torch.ones(2)\nif USE_TORCH_TPU:\n    x.to('tpu')\nprint('tpu')"),
        ],
    ),
    "tpu-device-number": (
        [
            (TORCHTPU, "r = dist.get_rank()\ntorch.zeros(2, device=f'tpu:{r}')  # <-"),
            (TORCHTPU, "torch.zeros(2).to('tpu:1')  # <-\ntorch.device('tpu', 1)  # <-"),
            (TORCHTPU, "torch.device(f'tpu:{local_rank}')  # <-"),
            (TORCHTPU, "torch.accelerator.set_device_index(dist.get_rank())  # <-"),
            (TORCHTPU, "torch.tpu.set_device(0)  # <-"),
        ],
        [
            (TORCHTPU, "torch.zeros(2, device='tpu:0').to('tpu')\ntorch.device('tpu', 0)"),
            (TORCHTPU, "torch.accelerator.set_device_index(0)\nprint(f'tpu:{rank}')"),
        ],
    ),
    "tpu-ddp-devices": (
        [
            (TORCHTPU, DDP, "DDP(m, device_ids=[local_rank])  # <-"),
            (TORCHTPU, DDP, "DDP(m, output_device=dist.get_rank())  # <-"),
        ],
        [
            (TORCHTPU, DDP, "DDP(m)\nDDP(m, device_ids=None)\nDDP(m, device_ids=[0])"),
            (TORCHTPU, DDP, "if torch.cuda.is_available():\n    DDP(m, device_ids=[rank])"),
        ],
    ),
    "tpu-group-backend": (
        [
            (TORCHTPU, "dist.init_process_group('xla')  # <-"),
            (TORCHTPU, "dist.init_process_group(backend='gloo')  # <-"),
        ],
        [
            (TORCHTPU, "dist.init_process_group('tpu_dist')\ndist.new_group(backend='gloo')"),
            (TORCHTPU, "dist.init_process_group('cpu:gloo,tpu:tpu_dist')"),
            (TORCHTPU, "if not on_tpu:\n    dist.init_process_group('gloo')"),
        ],
    ),
    "tpu-compile": (
        [
            (TORCHTPU, "torch.compile(m, mode='max-autotune')  # <-"),
            (TORCHTPU, "torch.compile(m, backend='inductor')  # <-"),
            (TORCHTPU, "torch.compile(m, backend='openxla')  # <-"),
        ],
        [(TORCHTPU, "torch.compile(m)\ntorch.compile(m, mode=None, backend='tpu')")],
    ),
    "tpu-collective": (
        [(TORCHTPU, "dist.reduce(x, 0)  # <-\ndist.monitored_barrier()  # <-")],
        [(TORCHTPU, "dist.all_reduce(x)\ndist.reduce(x, 0, group=cpus)\nreduce(f, x)")],
    ),
    "tpu-removed-name": (
        [
            (TORCHTPU, "from torch_tpu import api  # <-\nd = api.tpu_device()"),
            (TORCHTPU, "import torch_tpu.api as api  # <-"),
            (TORCHTPU, "from torch.tpu.distributed import environment  # <-"),
            (TORCHTPU, "!python -m torch.tpu.distributed.environment"),
        ],
        [
            (TORCHTPU, "from torch.tpu.distributed import set_tpu_launch_env"),
            (TORCHTPU, "!python -m torch.tpu.distributed"),
            (TORCHTPU, "try:\n    from torch_tpu import api\nexcept ImportError:\n    api = None"),
        ],
    ),
    "tpu-moved-name": (
        [(TORCHTPU, "torch.tpu.is_available()  # <-\ntorch.tpu.synchronize()  # <-")],
        [
            (TORCHTPU, "torch.accelerator.is_available()\ntorch.tpu.get_device_properties()"),
            (
                TORCHTPU,
                "os.environ['TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS'] = '1'\ntorch.tpu.synchronize()",
            ),
        ],
    ),
    "tpu-group-cpu-tensor": (
        [
            (
                TORCHTPU,
                TPU_GROUP + "x = torch.ones(2)\ndist.all_reduce(x)  # <-",
            ),
            (TORCHTPU, "dist.init_process_group('tpu')\ndist.broadcast(torch.zeros(2), 0)  # <-"),
        ],
        [
            (
                TORCHTPU,
                TPU_GROUP + "x = torch.ones(2, device='tpu')\ndist.all_reduce(x)",
            ),
            (
                TORCHTPU,
                TPU_GROUP + "x = torch.ones(2)\nx = x.to('tpu')\ndist.all_reduce(x)",
            ),
            (
                TORCHTPU,
                BOTH_GROUPS + "dist.broadcast(torch.zeros(2), 0)",
            ),
            (
                TORCHTPU,
                TPU_GROUP + "x = torch.ones(2)\nx += y\ndist.all_reduce(x)",
            ),
        ],
    ),
    "tpu-loader-workers": (
        [(TORCHTPU, "%%tpu_train\nloader = DataLoader(d, 8, num_workers=2)  # <-")],
        [
            (TORCHTPU, "%%tpu_train\nloader = DataLoader(d, 8, num_workers=0)"),
            (
                TORCHTPU,
                "%%tpu_train\nl = DataLoader(d, num_workers=1, multiprocessing_context='spawn')",
            ),
            (TORCHTPU, "loader = DataLoader(d, 8, num_workers=2)", "%%tpu_train\nprint(1)"),
        ],
    ),
}
"""Rule → (notebooks that violate it, near misses)."""
