# Every target sets up .venv by itself: it needs Python 3.10 or later with pip, make and git.
#
#   make demo    run the quickstart notebook on this machine's TPU, or on 4 rehearsal cores
#                (BACKEND=torchtpu: that of TorchTPU)
#   make test    the tests that start no process, and a scenario for each line of the README
#                (ARGS="-k name": all that match; CI=true: all scenarios)
#   make test-torchtpu  the tests that need TorchTPU's torch (CI=true make test: these, too)
#   make test-long  what repeats, trains or needs a browser
#   make check   lint, format, types, import layers, words
#   make bench   the benchmarks (BACKEND=torchtpu: those of TorchTPU)
#   make docs    the site, in out/docs; executes the notebooks that have changed (ARGS=--saved: none)
#   make picture renders docs/quickstart.png again, from a run in JupyterLab (needs chromium)
#   make matrix  what people do, in Colab's and Kaggle's environments, the newest and the oldest

PYTHON ?= python3
# libtpu is large, and of use only where there is a TPU.
XLA := $(if $(wildcard /dev/accel0 /dev/vfio/0),tpu,xla)

# Scenarios mostly wait for their processes: in CI more of them run at once than there are cores.
WORKERS := --numprocesses $(if $(filter true,$(CI)),4,2)

# Container images often set it. Each process would then compile torch anew: twice the time to
# import torch_xla.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-torchtpu test-long check bench docs picture matrix
.DELETE_ON_ERROR:

# BACKEND=torchtpu: the same with TorchTPU, in an environment of its own.
DEMO := $(if $(filter torchtpu,$(BACKEND)),torchtpu/)00_quickstart
DEMO_VENV := .venv$(if $(filter torchtpu,$(BACKEND)),-torchtpu)

demo: $(DEMO_VENV)/.demo
	mkdir -p $(dir out/$(DEMO))
	$(DEMO_VENV)/bin/tpunb run notebooks/$(DEMO).ipynb out/$(DEMO).ipynb
	$(DEMO_VENV)/bin/jupyter nbconvert --to html --log-level WARN out/$(DEMO).ipynb
	@$(DEMO_VENV)/bin/python -c "$$LAST_LINE" out/$(DEMO).ipynb

test: .venv/.ready $(if $(filter true,$(CI)),test-torchtpu)
	.venv/bin/pytest $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

TORCHTPU_TESTS := tests/backends/torchtpu $(addprefix tests/backends/rehearsal/,test_distributed.py test_install.py)

test-torchtpu: .venv-torchtpu/.ready
	.venv-torchtpu/bin/pytest $(WORKERS) --dist loadgroup $(TORCHTPU_TESTS) $(ARGS)

test-long: .venv/.ready .venv-torchtpu/.ready
	.venv-torchtpu/bin/pytest --numprocesses 2 --dist loadfile $(wildcard tests/long/test_torchtpu_*.py) $(ARGS)
	.venv/bin/pytest --numprocesses 2 --dist loadfile tests/long $(ARGS)

check: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python -m tests.words

bench: $(DEMO_VENV)/.ready
	$(DEMO_VENV)/bin/python -m benchmarks$(if $(filter torchtpu,$(BACKEND)),.torchtpu) $(ARGS)

docs: .venv/.ready $(if $(findstring --saved,$(ARGS)),,.venv-torchtpu/.ready)
	.venv/bin/python docs/site/build.py $(ARGS)

picture: .venv/.ready
	.venv/bin/python -m tests.picture

matrix: .venv/.ready
	.venv/bin/python tests/matrix.py $(ARGS)

# What `make demo` needs, then what the checks and tests need besides. .demo and .ready are written
# last, so a set-up that was cut short starts again. When only pyproject.toml is newer, what is there
# is brought up to date. The environment is made without pip, because Debian's Python cannot put one
# in; the outer pip brings uv, and uv the rest, in parallel.
.venv/.demo: pyproject.toml
	@test -e $@ || $(PYTHON) -m venv --clear --without-pip .venv
	@rm -f $@
	$(PYTHON) -m pip --quiet --python .venv/bin/python install --upgrade uv
	.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --editable '.[$(XLA),demo]'
	@touch $@

.venv/.ready: .venv/.demo
	.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --editable '.[$(XLA),kaggle,demo]' --group dev --group docs
	@touch $@

# The environment for TorchTPU, with a torch that torch_xla does not fit. pip, and not uv, installs
# torch: where a mirror or a constraint offers a build for the CPU, it is a tenth of the size.
TORCHTPU_TORCH ?= torch==2.13.0
.venv-torchtpu/.demo: pyproject.toml
	@test -e $@ || $(PYTHON) -m venv --clear --without-pip .venv-torchtpu
	@rm -f $@
	$(PYTHON) -m pip --quiet --python .venv-torchtpu/bin/python install --upgrade uv '$(TORCHTPU_TORCH)'
	.venv-torchtpu/bin/uv pip install --quiet --compile-bytecode --python .venv-torchtpu/bin/python --editable '.[demo]' '$(TORCHTPU_TORCH)'
	@touch $@

.venv-torchtpu/.ready: .venv-torchtpu/.demo
	.venv-torchtpu/bin/uv pip install --quiet --compile-bytecode --python .venv-torchtpu/bin/python --editable '.[demo]' --group test '$(TORCHTPU_TORCH)'
	@touch $@

# The last line that the notebook printed: what was trained, on what, and the accuracy.
define LAST_LINE
import sys, nbformat
cells = nbformat.read(sys.argv[1], as_version=4).cells
printed = [out.text for cell in cells for out in cell.get("outputs", []) if out.get("name") == "stdout"]
print(printed[-1].strip().splitlines()[-1])
endef
export LAST_LINE
