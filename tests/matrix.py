"""`make matrix`: the quickstart in the environments that platforms have, and in the extremes.

    python tests/matrix.py [NAME …]

One after the other, each in a virtual environment of its own that is removed afterwards (about
7 GB, for the time being). Prints a row of the table in docs/setup.md for each. uv finds the
interpreters, or brings them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).with_name("uv"))
ENVIRONMENTS: dict[str, tuple[str, list[str]]] = {
    # googlecolab/backend-info a724079: the TPU runtime.
    "Colab": ("3.13", [
        "torch==2.9.0", "torch_xla==2.9.0", "numpy==2.1.3", "ipython==7.34.0",
        "ipykernel==6.17.1", "ipywidgets==7.7.1", "jupyter_client==7.4.9", "nbconvert==7.17.1",
    ]),
    # Kaggle/docker-python 78aaa43, tpu/.
    "Kaggle": ("3.12", ["torch==2.8.0", "torch_xla==2.8.0"]),
    "newest": ("3.13", ["torch_xla", "torch==2.9.0", "--upgrade"]),
    "oldest": ("3.10", ["torch==2.8.0", "torch_xla==2.8.0", "numpy==1.26.4", "--resolution",
                        "lowest-direct"]),
}  # fmt: skip
SHOWN = ("torch", "torch_xla", "numpy", "ipython", "ipykernel", "ipywidgets", "jupyter_client",
         "nbconvert", "papermill", "pandas")  # fmt: skip
ASK = """\
import json, platform
from importlib.metadata import version
print(json.dumps({"python": platform.python_version()} | {name: version(name) for name in %r}))"""


def main() -> None:
    chosen = sys.argv[1:] or list(ENVIRONMENTS)
    print(f"| environment | Python | {' | '.join(SHOWN)} | quickstart |")
    print("|---" * (len(SHOWN) + 3) + "|", flush=True)
    failed = False
    for name in chosen:
        python, wanted = ENVIRONMENTS[name]
        with tempfile.TemporaryDirectory(prefix=f"tpunb-matrix-{name}-") as folder:
            row, good = _try(Path(folder), python, wanted)
        print(f"| {name} | {row} |", flush=True)
        failed = failed or not good
    sys.exit(failed)


def _try(folder: Path, python: str, wanted: list[str]) -> tuple[str, bool]:
    """Make the environment and run the quickstart in it: the rest of its row."""
    made = folder / "venv"
    _run([UV, "venv", "--quiet", "--python", python, str(made)])
    _run([UV, "pip", "install", "--quiet", "--python", str(made), f"{ROOT}[demo]", *wanted])
    have = json.loads(_run([str(made / "bin/python"), "-c", ASK % (SHOWN,)]))
    began = time.monotonic()
    # As a person who has activated it: no other environment's kernels, no settings of this one.
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "PYTHON"))
    }
    env["PATH"] = f"{made / 'bin'}:{env['PATH']}"
    done = subprocess.run(
        [str(made / "bin/tpunb"), "run", str(ROOT / "notebooks/00_quickstart.ipynb"),
         str(folder / "out.ipynb")],
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip
    took = time.monotonic() - began
    if done.returncode == 0:
        last = f"works, {took:.0f} s"
    else:
        last = f"exit {done.returncode}"
        print(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
    return " | ".join([*have.values(), last]), done.returncode == 0


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
