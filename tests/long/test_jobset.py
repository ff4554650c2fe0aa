"""The pods of a manifest as processes of this machine: their own command line, two nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.places.test_jobset import V6E, manifest, notebook, pod_of, project

IMPORTS = """import os
import torch
import torch.distributed as dist"""
TRAIN = """dist.init_process_group('gloo')
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), total.item(), os.environ['WORD'])"""


class PodProcess:
    """A pod of a manifest, as a process of this machine: one rank instead of one for each chip."""

    def __init__(self, objects: list[Any], rank: int, folder: Path, port: int) -> None:
        config, secret, jobset_ = objects
        name = jobset_["metadata"]["name"]
        [container] = pod_of(objects)["containers"]
        folder.mkdir()
        (folder / "script.py").write_text(config["data"]["script.py"])
        replaced = {
            "$(NODE_RANK)": str(rank),
            f"{name}-node-0-0.{name}": "127.0.0.1",
            "--master-port=8460": f"--master-port={port}",
            "--nproc-per-node=4": "--nproc-per-node=1",
            "/etc/tpunb": str(folder),
        }
        words = []
        for word in container["command"]:
            for old, new in replaced.items():
                word = word.replace(old, new)
            words.append(word)
        values = {each["name"]: each.get("value", str(rank)) for each in container["env"]}
        if "PJRT_DEVICE" in values:
            values = {"NODE_RANK": str(rank), "PJRT_DEVICE": "CPU"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, "PATH": path, **values, **secret["stringData"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> str:
        out, err = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, err
        return out


@pytest.mark.usefixtures("starts_processes")
def test_pods_of_a_manifest_train_together(
    project: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (project / "places.toml").write_text(V6E.replace("4x4", "2x4"))
    notebook(IMPORTS, f"%%tpu_train --env WORD=hush\n{TRAIN}")
    objects = manifest(capsys)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = [PodProcess(objects, rank, tmp_path / f"pod{rank}", port) for rank in range(2)]
    last = [pod.finish().splitlines()[-1] for pod in pods]
    assert last == ["0 2 3.0 hush", "1 2 3.0 hush"]
