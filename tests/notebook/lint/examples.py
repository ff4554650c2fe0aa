"""Notebooks that violate each rule, and near misses that do not.

`# <-` marks the lines that the rule must report.
"""

from __future__ import annotations

from sys import version_info

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

FIT = "%%tpu_train\ntrainer = L.Trainer()\ntrainer.fit(Net(), loader)"

NET = "class Net(nn.Module):\n    def forward(self, x):\n        {0}"


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
    "undefined-name": (
        [
            ("x = 1", "%%tpu_train\nprint(x, y)  # <-"),
            ("# import torch\n\ndef f():\n    return torch.ones(1)  # <-", "%%tpu_train\nf()"),
            ("print(later)  # <-", "later = 1"),
            ("!ls\nprint(_exit_code)  # <-", "%%tpu_train\n1"),
            ("import tpunb", "def f(x):\n    return x * scale  # <-\ntpunb.launch(f, (1,))"),
        ],
        [
            ("def f():\n    return later", "later = 1", "%%tpu_train\nf()"),
            ("from lib import *", "model = Net()"),
            ("%run other.py", "model = Net()"),
            ("%tpu_attach far", "print(weights)"),
            ("%%cython\ncdef int f(int x):\n    return x", "print(f(1))"),
            ("# tpu: skip\nx = 1", "%%tpu_train\nprint(x)"),
            ("from __future__ import annotations\ndef f(x: Tensor) -> Tensor: pass",),
            ("try:\n    unicode\nexcept NameError:\n    unicode = str",),
            ("from contextlib import suppress\nwith suppress(NameError):\n    old",),
            *((("try:\n    old\nexcept* NameError:\n    1",),) if version_info >= (3, 11) else ()),
            ("display(get_ipython())\n_", "print(In, Out, _1, __name__, __file__)"),
        ],
    ),
    "not-returned": (
        [
            ("%%tpu_train\nlosses = [1]", "print(losses)  # <-"),
            ("%%tpu_train --out r\nx = 1", "r.state\ny = x + 1  # <-", "%%tpu_train\ny"),
            ("net = Net()", "%%tpu_train\nSGD(net.parameters())", "net.eval()  # <-"),
            (
                "import lightning as L\nnet = Net()",
                "%%tpu_train\ntrainer = L.Trainer()\ntrainer.fit(net, loader)",
                "print(net(x))  # <-",
            ),
            (
                "import transformers\nmodel = make()",
                "%%tpu_train\ntrainer = transformers.Trainer(model=model)\ntrainer.train()",
                "model(x)  # <-\ntrainer.evaluate()  # <-",
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
        ],
        [
            ("losses = []", "%%tpu_train --returns losses\nlosses.append(1)", "plot(losses)"),
            ("losses = []", "%%tpu_train\nlosses.append(1)", "losses = [1]\nplot(losses)"),
            ("losses = []", "def f(losses):\n    losses.append(1)", "%%tpu_train\nf([])", "losses"),
            (
                "import lightning as L\nnet = Net()",
                "%%tpu_train\ntrainer = L.Trainer()\ntrainer.fit(net)\n"
                "trainer.save_checkpoint('a')",
                "net = Net.load_from_checkpoint('a')\nnet(x)",
            ),
            ("%%tpu_train --returns {names}\nx = 1", "print(x)"),
            ("%run other.py", "%%tpu_train\nx = 1", "print(x)"),
            ("%%tpu_train\nx = 1", "def f(x):\n    return x", "lambda x: x"),
            ("%%tpu_train\nx = 1", "%%tpu_train\nx = 2\nprint(x)"),
        ],
    ),
    "retired-name": (
        [
            ("from torch_xla.core.xla_model import get_log_fn  # <-",),
            ("import torch_xla.distributed.xla_dist as xd  # <-",),
            (IMPORTS, "def f():\n    return xm.get_log_fn  # <-"),
        ],
        [
            (IMPORTS, "n = xm.xrt_world_size()"),  # a run has it again
            (IMPORTS, "def f(xm):\n    return xm.get_log_fn()"),
            (IMPORTS, "try:\n    n = xm.get_log_fn()\nexcept AttributeError:\n    n = print"),
        ],
    ),
    "bf16-variable": (
        [
            ("import os\nos.environ['XLA_USE_BF16'] = '1'  # <-",),
            ("%env XLA_USE_BF16=1",),
            ("!XLA_USE_BF16=1 python train.py",),
        ],
        [
            ("import os\nos.environ['XLA_USE_BF16'] = '0'",),
            ("env = {}\nenv['XLA_USE_BF16'] = '1'",),
        ],
    ),
    "tracker-above": (
        [
            ("import wandb\nwandb.init()  # <-", TRAIN),
        ],
        [
            ("# tpu: skip\nimport wandb\nwandb.init()", TRAIN),
            ("import wandb", f"{TRAIN}\nwandb.init()"),
            ("import wandb\nwandb.init()",),
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
            (
                IMPORTS + "from tpunb.training import Accumulation",
                STEP.format("", "a.step()"),
                "a = Accumulation(optimizer, 4)",
            ),
        ],
    ),
    "host-sync-in-step": (
        [
            (IMPORTS, loop("total += loss.item()  # <-"), TRAIN),
            (IMPORTS, loop("print(f'loss {loss}')  # <-"), TRAIN),
            (IMPORTS, loop("m = xm.mesh_reduce('loss', loss, sum)  # <-"), TRAIN),
            (ACCELERATED.replace("pass", "print(loss)  # <-"), "notebook_launcher(train)"),
            (LIGHTNING.format("self.log('loss', loss.item())  # <-"), FIT),
        ],
        [
            (IMPORTS, loop("if step % 100 == 0:", "    print(loss.item())"), TRAIN),
            (ACCELERATED.replace("pass", "print(loss)"), "train()"),
            (LIGHTNING.format("print(loss.item())"), FIT.replace("%%tpu_train\n", "")),
            (IMPORTS, loop("if step % 100:", "    continue", "print(loss.item())"), TRAIN),
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
            (IMPORTS, loop(reduce="xm.reduce_gradients(o)\n        optimizer.step()"), TRAIN),
            (IMPORTS, loop(reduce="optimizer.step()"), ONE_CORE),
            (IMPORTS, loop("dist.send(x, 1)", reduce="optimizer.step()"), TRAIN),
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
    "optimizer-before-device": (
        [(IMPORTS, f"{MODEL}\n{SGD}  # <-\nmodel.to(torch_xla.device())")],
        [
            (IMPORTS, f"{MODEL}\nmodel.to(torch_xla.device())\n{SGD}"),
            (IMPORTS, f"{MODEL}.to(torch_xla.device())\n{SGD}", "model.to(torch_xla.device())"),
        ],
    ),
    "changing-shape": (
        [
            (IMPORTS, loop("kept = loss[x > 0]  # <-"), TRAIN),
            (IMPORTS, loop("x = x.to('xla')", "kept = x[x > 0]  # <-"), TRAIN),
            (IMPORTS, NET.format("return torch.unique(x)  # <-")),
        ],
        [
            (IMPORTS, loop("kept = torch.where(x > 0, loss, 0)"), TRAIN),
            (IMPORTS, "rows = torch.nonzero(x)"),
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
            (IMPORTS, "%%tpu_train\nr = xr.global_ordinal()\nif r < 4:\n    dist.barrier()  # <-"),
            (
                IMPORTS,
                "def f(i):\n    if i == 0:\n        xm.rendezvous('x')  # <-",
                "xmp.spawn(f)",
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
                    *("rank in range(world_size)"),
                    *("world_size == 1 and rank == 0", "not (xr.world_size() > 1 or rank != 0)"),
                    *("xr.world_size() > 1", "local_rank != -1"),
                )
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
            (IMPORTS, "path = 'a'", "%%tpu_train\nif x:\n    y\n!cp {path} out/  # <-"),
            (IMPORTS, "def f():\n    !echo done >> log.txt  # <-", "%%tpu_train\nf()"),
            (IMPORTS, "%%tpu_train\nget_ipython().run_cell_magic('bash', '', 'rm a')  # <-"),
        ],
        [
            (IMPORTS, "%%tpu_train\nif rank == 0:\n    open('a', 'w')"),
            (IMPORTS, "%%tpu_train\nopen(f'{rank}.txt', 'w')\nopen('data.txt')"),
            (IMPORTS, "def f():\n    if x: return\n    open('a', 'w')", "%%tpu_train\nf()"),
            (IMPORTS, "@rank_zero_only\ndef f():\n    open('a', 'w')", "%%tpu_train\nf()"),
            (IMPORTS, "%%tpu_train\nxm.save({}, 'm.pt')"),
            (IMPORTS, "!cp a b", "%%tpu_train\nif rank == 0:\n    !cp a b\n!ls; nvidia-smi 2>&1"),
            (IMPORTS, "%%tpu_train\n!cp a {rank}\n!touch $RANK\n!mkdir -p a\n!ls > /dev/null"),
            (IMPORTS, "%%tpu_train\nout = f'{rank}.pt'\n!cp a {out}"),
        ],
    ),
    "last-batch": (
        [
            (IMPORTS, "loader = DataLoader(train_data, batch_size=8, shuffle=True)  # <-", loop()),
        ],
        [
            (IMPORTS, "loader = DataLoader(train_data, 8, shuffle=True, drop_last=True)", loop()),
            (IMPORTS, "loader = DataLoader(val_data, batch_size=8)", loop()),
            (IMPORTS, "shown = DataLoader(train_data, 4)\nx = next(iter(shown))", loop()),
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
    "unequal-batches": (
        [
            (IMPORTS, "%%tpu_train\nfor x in rows[rank :: xr.world_size()]:  # <-\n    x"),
            (IMPORTS, "%%tpu_train\nl = DataLoader(rows[rank::world_size])  # <-"),
            (IMPORTS, "%%tpu_train\npart = Subset(rows, range(rank, n, xr.world_size()))  # <-"),
        ],
        [
            (IMPORTS, "%%tpu_train\npart = rows[rank * 8 : rank * 8 + 8]\nlen(part)"),
            (
                IMPORTS,
                "%%tpu_train\nm = n // 8 * 8\npart = Subset(rows, range(rank, m, world_size))",
            ),
            (IMPORTS, "%%tpu_train\nr = xr.global_ordinal()\nmodel(rows[r::n].to(device))"),
            (IMPORTS, "%%tpu_train\nx, y = xs[rank::n], ys[rank::n]\nloss(model(x), y)"),
        ],
    ),
    "torch-save-on-xla": (
        [
            (IMPORTS, loop() + "    torch.save(model.state_dict(), 'm.pt')  # <-", TRAIN),
        ],
        [
            (IMPORTS, loop() + "    model.cpu()\n    torch.save(model.state_dict(), 'm')", TRAIN),
            (IMPORTS, loop() + "    xm.save(model.state_dict(), 'm.pt')", TRAIN),
        ],
    ),
    "ddp-arguments": (
        [(IMPORTS, DDP, "m = DDP(m, gradient_as_bucket_view=True)  # <-", TRAIN)],
        [(IMPORTS, DDP, "DDP(m)\nDDP(m, gradient_as_bucket_view=False)", TRAIN)],
    ),
    "tpu-loader-workers": (
        [(TORCHTPU, "%%tpu_train\nloader = DataLoader(d, 8, num_workers=2)  # <-")],
        [
            (TORCHTPU, "%%tpu_train\nloader = DataLoader(d, 8, num_workers=0)"),
            (TORCHTPU, "loader = DataLoader(d, 8, num_workers=2)", "%%tpu_train\nprint(1)"),
        ],
    ),
}
"""Rule → (notebooks that violate it, near misses)."""
