"""What `make matrix` does in whole, here in part: Colab's packages, and one kernel with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.drivers import tour

# Of Colab's list (tests/matrix.py has its commit): what tpunb stands on, and what preludes import
# most. What takes long to import, as transformers, is in `make matrix`.
COLAB = """
    torch==2.9.0 torch_xla==2.9.0 torchvision==0.24.0 numpy==2.1.3 pandas==2.2.3 pyarrow==25.0.1
    scipy==1.16.3 scikit-learn==1.6.1 matplotlib==3.10.0 pillow==12.3.0
    ipython==7.34.0 ipykernel==6.17.1 ipywidgets==7.7.1
    widgetsnbextension==3.6.10 jupyter_client==7.4.9 jupyter_core==5.9.1 traitlets==5.7.1
    tornado==6.5.7 pyzmq==26.2.1 nbconvert==7.17.1 nbclient==0.10.4 nbformat==5.11.1
    prompt_toolkit==3.0.53 matplotlib-inline==0.2.2 importlib-metadata==4.6.4 entrypoints==0.4
    psutil==5.9.5 fsspec==2026.2.0 rich==15.0.0 tqdm==4.67.3 protobuf==7.35.1 threadpoolctl==3.6.0
    joblib==1.5.3 packaging==26.3 PyYAML==6.0.3
"""


@pytest.mark.usefixtures("starts_processes")
def test_tour_of_features_with_the_packages_of_colab(tmp_path: Path) -> None:
    """On this interpreter, whose torch is there already; Colab's own is in `make matrix`."""
    environment = matrix.Environment(sys.executable, lambda _: COLAB.split())
    wheel = matrix.build_wheel(tmp_path)
    python, replaced = matrix.make(environment, tmp_path / "venv", wheel, None)
    assert replaced == []
    found = tour.visit(python, tmp_path / "tour", environment.env)
    assert not any(found.values()), "\n".join(found.values())
