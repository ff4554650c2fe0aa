"""What people do in a notebook, one thing after the other, in one kernel of any environment."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import nbformat

from tests.drivers.kernel import ROOT, Kernel, Ran, of_interpreter, until

CORES = 2
EPOCHS = "epochs = 12", "epochs = 4"
"""The quickstart's line, and the one that is run in its place: the accuracy is reached by then."""


class Tour:
    """A kernel, and one method for each thing that must work in it, in the order of `STOPS`."""

    def __init__(
        self, python: Path, folder: Path, env: dict[str, str], *, torchtpu: bool = False
    ) -> None:
        """`python`: of an environment that has tpunb; `env`: what its image sets.

        `torchtpu`: it has a torch for TorchTPU, and no torch_xla.
        """
        self._torchtpu = torchtpu
        # No other environment's packages, and its own programs first, as where it is activated.
        env = {"PYTHONPATH": "", "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin"} | env
        make = of_interpreter(python, folder / "kernels")
        self.nb = Kernel(folder, file="tour.ipynb", env=env, make=make)

    def quickstart(self) -> None:
        name = "torchtpu/00_quickstart" if self._torchtpu else "00_quickstart"
        self._notebook(name, "cores = 4", f"cores = {CORES}", *EPOCHS)
        assert self.nb.value("tpunb.last_run.world_size, tpunb.last_run.replicated") == (2, False)

    def plot(self) -> None:
        ran = self.nb.run("# tpu: skip\ntpunb.last_run.plot()").good()
        assert ran.value is not None
        assert "image/png" in ran.value, sorted(ran.value)

    def values(self) -> None:
        """What one train cell returned is there in the next one."""
        self._new_notebook()
        self._train("weights = [1.0, 2.0]", "--returns weights").good()
        self.nb.run("total = sum(weights)").good()
        ran = self._train("print('total', total, 'of', len(weights))").good()
        assert "total 3.0 of 2" in ran.stdout

    def data_science(self) -> None:
        """The prelude runs once whatever it has imported: its process can be forked."""
        self._new_notebook()
        self.nb.run(
            "import io\nimport matplotlib.pyplot as plt, numpy as np, pandas as pd, torch\n"
            "from PIL import Image\nfrom sklearn.ensemble import RandomForestClassifier\n"
            "x = np.random.rand(300, 5)\n"
            "forest = RandomForestClassifier(5, n_jobs=2).fit(x, x[:, 0] > 0.5)\n"
            "table = pd.read_csv(io.BytesIO(b'a,b\\n' + b'1,2\\n' * 9000))\n"
            "table.groupby('a').b.mean(), pd.get_dummies(pd.Series(['x', 'y']))\n"
            "torch.rand(500, 500) @ torch.rand(500, 500);"
        ).good()
        self.nb.run(
            "import importlib.util\n"
            "for name in ('pyarrow.dataset', 'datasets', 'transformers', 'torchvision', 'cv2'):\n"
            "    if importlib.util.find_spec(name.partition('.')[0]):\n"
            "        importlib.import_module(name)"
        ).good()
        self._train("print('trees', len(forest.estimators_), 'rows', len(table))").good()
        assert self.nb.value("tpunb.last_run.replicated, tpunb.last_run.replicate_reason") == (
            False,
            "",
        )

    def debug(self) -> None:
        ran = self.nb.run(
            "%%tpu_debug\n"
            "a = torch.ones(3, device=torch.device('tpu'))\nprint('sum', a.sum().item())"
            if self._torchtpu
            else "%%tpu_debug\nimport torch_xla\n"
            "a = torch.ones(3, device=torch_xla.device())\nprint('sum', a.sum().item())"
        ).good()
        assert "sum 3.0" in ran.stdout

    def failing_rank(self) -> None:
        ran = self._train(
            "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')\n"
            "import time\ntime.sleep(600)"
        )
        assert ran.error is not None
        assert ran.error["ename"] == "RankFailedError"
        where = f"rank 1 failed in cell [{ran.number}], line 4: ValueError: bad batch"
        assert where in ran.traceback, ran.traceback

    def interrupt(self) -> None:
        source = "import time\nprint('at work', flush=True)\ntime.sleep(600)"
        ran = self.nb.send(f"%%tpu_train --grace 1\n{source}", "train")
        self.nb.until(ran, "at work")
        self.nb.interrupt()
        self.nb.wait(ran)
        assert ran.error is not None
        assert self.nb.value("tpunb.last_run.state") == "interrupted", ran.traceback
        until(lambda: not self.nb.working(), "no rank is left")

    def background(self) -> None:
        ran = self._train("n = 5", "--bg --returns n --out later").good()
        assert ran.displays
        assert self.nb.value("'n' in globals()") is False
        self.nb.run("later.wait()", "wait").good()
        assert self.nb.value("n, later.state") == (5, "succeeded")

    def spawn(self) -> None:
        if not self._torchtpu:
            self._notebook("01_spawn_unchanged")
            return
        self._new_notebook()
        ran = self._train(
            "import torch.distributed as dist, torch.multiprocessing as mp\n"
            "def main(rank, world):\n"
            "    dist.init_process_group('tpu_dist', rank=rank, world_size=world)\n"
            "    print('rank', rank, 'of', dist.get_world_size())\n"
            f"mp.spawn(main, args=({CORES},), nprocs={CORES})"
        ).good()
        assert "rank 1 of 2" in ran.stdout

    def close(self) -> None:
        self.nb.stop()

    def _new_notebook(self) -> None:
        """The same kernel, and none of the cells that there were."""
        self.nb.cells.clear()
        self.nb.run(f"%load_ext tpunb\n%tpu_setup --cores {CORES}\nimport tpunb").good()

    def _notebook(self, name: str, *changes: str) -> None:
        """Run a notebook's cells. `changes`: text and what to run in its place, in turn."""
        self._new_notebook()
        cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
        sources = [cell.source for cell in cells if cell.cell_type == "code"]
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert sum(old in source for source in sources) == 1, old
            sources = [source.replace(old, new) for source in sources]
        for source in sources:
            self.nb.run(source).good()

    def _train(self, source: str, options: str = "") -> Ran:
        return self.nb.run(f"%%tpu_train {options}\n{source}", "train" if not options else None)


STOPS: tuple[Callable[[Tour], None], ...] = (
    Tour.quickstart,
    Tour.plot,
    Tour.values,
    Tour.data_science,
    Tour.debug,
    Tour.failing_rank,
    Tour.interrupt,
    Tour.background,
    Tour.spawn,
)


def visit(
    python: Path, folder: Path, env: dict[str, str], *, torchtpu: bool = False
) -> dict[str, str]:
    """What went wrong at each stop; "" where all is well."""
    tour = Tour(python, folder, env, torchtpu=torchtpu)
    found = {}
    try:
        for stop in STOPS:
            try:
                stop(tour)
                found[stop.__name__] = ""
            except Exception:
                found[stop.__name__] = traceback.format_exc()
    finally:
        tour.close()
    return found
