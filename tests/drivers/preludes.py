"""What preludes do with libraries, and forks after it: in tests, and in other environments."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from tests.drivers.ranks import warm

FORKED = {
    "torch": """
        import torch
        torch.set_num_threads(4)
        with torch.no_grad():
            torch.nn.Conv2d(3, 8, 3)(torch.rand(2, 3, 64, 64))
        torch.rand(700, 700) @ torch.rand(700, 700)
        """,
    "numpy": """
        import numpy as np
        a = np.random.rand(500, 500)
        np.linalg.svd((a @ a)[:80])
        """,
    "scipy": """
        import numpy as np
        import scipy.fft
        import scipy.linalg
        scipy.fft.fft(np.random.rand(8, 4096), workers=2)
        scipy.linalg.svd(np.random.rand(200, 200))
        """,
    "sklearn": """
        from sklearn.cluster import KMeans
        from sklearn.datasets import load_digits
        from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
        x, y = load_digits(return_X_y=True)
        HistGradientBoostingClassifier(max_iter=2).fit(x[:200], y[:200])
        RandomForestClassifier(10, n_jobs=2).fit(x, y)
        KMeans(3, n_init=1).fit(x)
        """,
    "joblib": """
        from joblib import Parallel, delayed
        assert Parallel(n_jobs=2)(delayed(abs)(number) for number in (-1, 2)) == [1, 2]
        """,
    "pandas": """
        import io
        import pandas as pd
        table = pd.DataFrame({"number": range(100_000), "word": ["x", "y"] * 50_000})
        file = io.BytesIO()
        table.to_parquet(file)
        pd.read_parquet(file).groupby("word").number.mean()
        pd.read_csv(io.BytesIO(b"a,b\\n" + b"1,2\\n" * 300_000), engine="pyarrow").sum()
        """,
    "pyarrow": """
        import io
        import pyarrow as pa, pyarrow.compute, pyarrow.csv, pyarrow.dataset
        table = pa.csv.read_csv(io.BytesIO(b"a,b\\n" + b"1,2\\n" * 300_000))
        pa.compute.sum(pa.dataset.dataset(table).to_table()["a"])
        """,
    "datasets": """
        import datasets
        rows = datasets.Dataset.from_dict({"a": list(range(5000))}).map(lambda row: {"b": row["a"]})
        rows.with_format("torch")[:3]
        """,
    "tokenizers": """
        import os
        os.environ["TOKENIZERS_PARALLELISM"] = os.environ.get("TOKENIZERS_PARALLELISM", "true")
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=99, show_progress=False)
        tokenizer.train_from_iterator(["many words"] * 1000, trainer)
        tokenizer.encode_batch(["many words"] * 1000)
        """,
    "transformers": """
        import torch
        from transformers import BertConfig, BertModel
        sizes = dict(hidden_size=64, num_attention_heads=2, intermediate_size=64)
        model = BertModel(BertConfig(vocab_size=99, num_hidden_layers=1, **sizes)).eval()
        with torch.no_grad():
            model(torch.ones(8, 64, dtype=torch.long))
        """,
    "torchvision": """
        import torch
        from torchvision.models import resnet18
        from torchvision.transforms import v2
        images = v2.Resize(40)(torch.rand(4, 3, 64, 64))
        with torch.no_grad():
            resnet18().eval()(images)
        """,
    "matplotlib": """
        import io
        import matplotlib.pyplot as plt
        plt.plot([1, 2])
        plt.savefig(io.BytesIO())
        plt.close()
        """,
    "PIL": """
        import io
        from PIL import Image
        Image.new("RGB", (900, 900)).resize((300, 300)).save(io.BytesIO(), "jpeg")
        """,
    "cv2": """
        import cv2
        import numpy as np
        cv2.setNumThreads(4)
        cv2.GaussianBlur(np.zeros((900, 900, 3), np.uint8), (31, 31), 5)
        """,
    "numexpr": """
        import numexpr
        import pandas as pd
        numexpr.set_num_threads(4)
        table = pd.DataFrame({"x": range(2_000_000)})
        table.eval("x + x")
        """,
    "tqdm": """
        from tqdm.auto import tqdm
        for _ in tqdm(range(3)):
            pass
        """,
    "lightgbm": """
        import lightgbm
        import numpy as np
        x = np.random.rand(2000, 5)
        lightgbm.LGBMClassifier(n_estimators=3, verbose=-1).fit(x, x[:, 0] > 0.5)
        """,
    "torch DataLoader": """
        import torch
        next(iter(torch.utils.data.DataLoader(torch.arange(99), num_workers=2)))
        """,
    "jax": "import jax",
    "tensorflow": "import tensorflow",
}
"""What forks well: a library, and what a prelude does with it."""

REFUSED = {
    "polars": (
        "import polars as pl\n"
        "pl.DataFrame({'a': range(99)}).lazy().filter(pl.col('a') > 3).collect()",
        "polars-0",
    ),
    "numba": (
        "import numba, numpy as np\n"
        "@numba.njit(parallel=True)\n"
        "def double(x):\n"
        "    for i in numba.prange(len(x)):\n"
        "        x[i] *= 2\n"
        "double(np.ones(9))",
        "uses numba's threads (OpenMP)",
    ),
    "concurrent.futures": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2, 'loader')\npool.submit(abs, 1).result()",
        "leaves a thread running (loader_0)",
    ),
    "tensorboardX": (
        "import tempfile, tensorboardX\n"
        "writer = tensorboardX.SummaryWriter(tempfile.mkdtemp())\nwriter.add_scalar('x', 1, 1)",
        "leaves 2 threads running (QueueFeederThread, Thread-",
    ),
    "jax array": ("import jax.numpy as jnp\njnp.ones(3) + 1", " threads running ("),
    "tensorflow tensor": ("import tensorflow as tf\ntf.constant([1, 2]) + 1", " threads running ("),
    "tensorstore": (
        "import tensorstore as ts\n"
        "spec = {'driver': 'zarr', 'kvstore': {'driver': 'memory'}}\n"
        "ts.open(spec, create=True, dtype=ts.int32, shape=[9]).result()[:].read().result()",
        " threads running (",
    ),
    "torch.autograd": (
        "import torch\ntorch.ones(2, requires_grad=True).sum().backward()",
        "runs a backward pass",
    ),
    "torch_xla": (
        "import torch, torch_xla\ntorch.ones(2, device=torch_xla.device())",
        "uses an XLA device",
    ),
}
"""What does not, and what is said."""


class Parent(NamedTuple):
    """What was seen in a process that has done what a prelude does."""

    problem: str | None
    codes: list[int]
    """Exit codes of its children, which do the same again; -9: it did not end."""


def fork_after(library: str, children: int) -> Parent | None:
    """In a process of its own: do what a prelude does with a library, fork, and do it again.

    None if it is not installed.
    """
    from tpunb.worker import fork_safety

    if importlib.util.find_spec(library.split()[0]) is None:
        return None
    code = textwrap.dedent(FORKED[library] if library in FORKED else REFUSED[library][0])
    fork_safety.limit_threads(2)
    os.chdir(tempfile.mkdtemp())
    check = fork_safety.ForkSafetyCheck()
    kept = {"__name__": "__main__"}
    exec(code, kept)
    problem = check.problem()
    if problem is not None:
        return Parent(problem, [])
    pids = []
    for number in range(children):
        exec(code, {"__name__": "__main__"})  # pools are there again
        pid = fork_safety.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                fork_safety.limit_threads(1 + number // 3)
                exec(code, {"__name__": "__main__"})
                fork_safety.pause_thread_pools()  # no process of joblib is left
                os._exit(0)
            os._exit(1)
        pids.append(pid)
    codes = wait_for(pids, 60)
    fork_safety.pause_thread_pools()
    return Parent(None, codes)


def wait_for(pids: list[int], seconds: float) -> list[int]:
    """Exit codes of children; who has not ended after that time is killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, 9)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def measure(python: Path, folder: Path) -> dict[str, str]:
    """Each library that an environment has: "forked", or what happened. `python`: its own."""
    found = {}
    with warm(folder, python) as ranks:
        for library in [*FORKED, *REFUSED]:
            (ended,) = ranks.run(fork_after, 1, library, 3)
            if ended.error:
                found[library] = ended.error.strip().splitlines()[-1]
            elif ended.value is not None:
                parent: Parent = ended.value
                children = "forked" if not any(parent.codes) else f"children: {parent.codes}"
                found[library] = parent.problem or children
    return found
