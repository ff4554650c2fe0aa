"""`make picture`: docs/quickstart.png, from a real run in a real JupyterLab (needs chromium)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.drivers import browser as browsers
from tests.drivers.kernel import PATIENCE, ROOT

MOMENT = "epoch 8 of 12"
"""When the picture is taken."""
CELLS = {
    "load": "%load_ext tpunb\n%tpu_setup --cores 4\nimport ipywidgets",
    "prelude": """import torch
import torch_xla
from torch import nn
from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16, dtype=torch.float32)[:1536], torch.tensor(digits)[:1536]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
loss_of = nn.CrossEntropyLoss()""",
    "train": """%%tpu_train --name quickstart
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import tpunb

device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
mine = list(zip(x.chunk(world)[rank].split(8), y.chunk(world)[rank].split(8)))
for epoch in tpunb.track(range(12), name="epoch"):
    for step, (images, labels) in enumerate(tpunb.track(mine)):
        predicted = model(images.to(device))
        loss = loss_of(predicted, labels.to(device))
        loss.backward()
        xm.optimizer_step(optimizer)  # averages the gradients of all cores
        optimizer.zero_grad()
        right = (predicted.argmax(1) == labels.to(device)).float().mean()
        tpunb.log(step=len(mine) * epoch + step, loss=loss, accuracy=right)
        torch_xla.sync()
    xm.master_print(f"epoch {epoch + 1} done")""",
}


def main() -> None:
    """Write the picture to the file that the command line names, else to where docs have it."""
    path = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "quickstart.png"
    with (
        tempfile.TemporaryDirectory(prefix="tpunb-picture-") as folder,
        browsers.chromium() as browser,
        browsers.opened(browser, "jupyterlab", CELLS, Path(folder)) as opened,
    ):
        opened.run_all()
        chart = opened.page.get_by_role("tab", name="chart")
        chart.click(timeout=PATIENCE * 1000)
        opened.shows("train", MOMENT)
        opened.cell("train").screenshot(path=path)
        opened.shows("train", "RunResult succeeded")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
