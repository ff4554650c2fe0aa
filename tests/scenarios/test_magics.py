"""The magics in real kernels: what a person types, and what they see below the cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import tpunb
from tests.drivers.kernel import Kernel, Ran, command, kernel, until
from tests.runs.test_tensorboard import curves
from tpunb.kernel.options import PARSERS
from tpunb.runs.directory import RunDir, list_runs

PACKAGE = str(Path(tpunb.__file__).parent)
PRELUDE = "import os, pathlib, signal, sys, time\nrank = lambda: int(os.environ['RANK'])"


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook in JupyterLab with two cells, to which each test adds a train cell."""
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 3", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


@pytest.fixture(autouse=True)
def _no_cell_or_name_of_another_test(request: pytest.FixtureRequest) -> None:
    if "nb" in request.fixturenames:
        nb: Kernel = request.getfixturevalue("nb")
        nb.start_over("load", "prelude")
        nb.run(PRELUDE, "prelude").good()


@pytest.fixture(scope="module")
def bare(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel as nbclient has it: no file, no ids, and, until TestDebug, no %tpu_setup."""
    with kernel(tmp_path_factory.mktemp("bare"), file=None) as made:
        made.run("%load_ext tpunb").good()
        yield made


def train(nb: Kernel, source: str, options: str = "") -> Ran:
    return nb.run(f"%%tpu_train {options}\n{dedent(source).strip()}\n", "train")


def last_run(nb: Kernel) -> RunDir:
    return list_runs(nb.folder / "runs")[-1]


def at_work(nb: Kernel, name: str, ranks: int = 3) -> None:
    """Wait until this many ranks have left a file of this name behind."""
    folder = nb.folder / name
    until(lambda: folder.is_dir() and len(list(folder.iterdir())) == ranks, f"{name} of all ranks")


def mark(name: str) -> str:
    """Code that leaves such a file behind."""
    return (
        f"os.makedirs({name!r}, exist_ok=True); "
        f"pathlib.Path({name!r}, str(rank())).write_text('') or None"
    )


class TestATrainCell:
    def test_card_and_log_of_a_train_cell(self, nb: Kernel) -> None:
        ran = train(nb, "print('hello from', rank())\nprint('same')").good()
        assert re.match(
            r"succeeded · 3 ranks · rehearsal on CPU · [\w ]+ · runs/[\d-]+-digits(-\d+)? · ended ",
            ran.status,
        )
        [bundle] = ran.cards()
        assert set(bundle) == {"text/plain", "text/html"}
        assert sorted(re.findall(r"\[(\d)\] hello from \1", ran.stdout)) == ["0", "1", "2"]
        assert "same" in ran.stdout
        assert ran.shown.startswith("RunResult succeeded on 3 rehearsal cores after ")
        assert ran.stderr == ""

    def test_second_run_uses_changed_cells_and_nothing_of_the_first_run(self, nb: Kernel) -> None:
        nb.run(f"{PRELUDE}\nfactor = 2", "prelude").good()
        first = train(nb, "made = [factor]\nprint('factor', factor)", "--returns made --cores 2")
        assert "[0-1] factor 2" in first.good().stdout or first.stdout.count("factor 2") == 2
        nb.run(f"{PRELUDE}\nfactor = 3", "prelude", saved=False).good()
        look = "print('factor', factor, hasattr(__import__('__main__'), 'made'))"
        second = train(nb, look, "--cores 1").good()
        assert "[0] factor 3 False" in second.stdout
        assert nb.value("made, factor") == ([2], 3)

    def test_figures_of_rank_0_are_displayed_and_saved_with_the_cell(self, nb: Kernel) -> None:
        ran = train(
            nb,
            """
            import matplotlib.pyplot as plt
            for step in range(2):
                plt.plot([step, rank()])
                plt.show()
                print("shown", step)
            plt.plot([1, 2])
            """,
        ).good()
        assert ran.stderr == ""
        assert [
            bundle["text/plain"].partition(":")[0]
            for bundle in ran.displays.values()
            if bundle.get("image/png", "").startswith("iVBOR")
        ] == ["figure 1", "figure 2", "figure 3"]

    def test_returns_out_option_last_run_and_tensorboard_metrics(self, nb: Kernel) -> None:
        ran = train(
            nb,
            """
            import torch, tpunb
            tpunb.log(step=1, loss=0.5)
            weights, n = torch.ones(2), rank()
            """,
            "--returns weights,n --out run",
        ).good()
        assert "returned: weights, n" in ran.shown
        nb.run("import tpunb", "import").good()
        assert nb.value("weights.tolist(), n") == ([1.0, 1.0], 0)
        assert nb.value("run is tpunb.last_run, run.state == 'succeeded'") == (True, True)
        assert nb.value("sorted(run.returns), run.metrics()['loss'].tolist()") == (
            ["n", "weights"],
            [0.5, 0.5, 0.5],
        )
        assert "loss 0.5" in ran.status
        assert "step 1" in ran.status
        folder = last_run(nb).path
        until(lambda: list(folder.glob("events.out.tfevents.*")), "TensorBoard's file")
        until(lambda: curves(folder) == {"loss": [(1, 0.5)]}, "its one value")

    def test_card_keeps_metrics_and_time_summary_at_the_end(self, nb: Kernel) -> None:
        ran = train(
            nb,
            """
            import torch, torch_xla, tpunb
            for step in range(3):
                x = torch.ones(64, 64, device="xla") * step
                for _ in range(20):  # so that compiling takes a moment
                    x = (x @ x).sin()
                tpunb.log(step=step, loss=x.sum(), tokens=4, reduce={"tokens": "sum"})
                torch_xla.sync()
                tpunb.save({"x": x, "pad": torch.zeros(10_000_000)}, step)
            """,
            "--cores 2",
        ).good()
        assert " · last tokens 8\n" in ran.status
        assert "\nbest loss " in ran.status
        [spent] = [line for line in ran.status.splitlines() if line.startswith("time: ")]
        parts = re.findall(r"([a-z ]+?) (\d+\.\d) s", spent)
        assert {"compiling", "checkpoints", "training"} <= {what.strip() for what, _ in parts}
        assert "\n" not in ran.shown
        [bundle] = ran.cards()
        assert spent in bundle["text/html"]

    def test_option_line_with_notebook_variables(self, nb: Kernel) -> None:
        nb.run("cores, opts, name = 2, '--cores 1', 'filled'", "values").good()
        assert "2 ranks" in train(nb, "pass", "--cores {cores} --name $name").good().status
        assert last_run(nb).id.endswith("-filled")
        assert "2 ranks" in train(nb, "pass", "--cores {cores * 1}").good().status
        assert "1 rank ·" in train(nb, "pass", "$opts").good().status

    def test_loop_over_numbers_of_cores_with_run_cell_magic(self, nb: Kernel) -> None:
        """The magic called by code: a cell that says to be skipped is no part of the run."""
        ran = nb.run(
            "# tpu: skip\nfor n in (1, 2):\n"
            "    get_ipython().run_cell_magic('tpu_train', f'--cores {n}', 'print(rank())')",
            "loop",
        ).good()
        assert [text.split(" · ")[1] for text in map(str, ran.statuses())] == ["1 rank", "2 ranks"]


class TestThatGoesWrong:
    """The message that a person needs; the kernel goes on, and nothing is left."""

    @pytest.fixture(autouse=True)
    def _the_next_run_works(self, nb: Kernel) -> Iterator[None]:
        kernel_before = nb.pid
        yield
        assert nb.working() == []
        nb.run(PRELUDE, "prelude").good()
        assert "still works" in train(nb, "print('still works')", "--cores 2").good().stdout
        assert nb.pid == kernel_before

    def test_failure_in_a_launcher_or_deep_recursion_is_short(self, nb: Kernel) -> None:
        ran = train(nb, "import torch_xla\ntorch_xla.launch(lambda index: 1 / 0)")
        assert "torch_xla.launch(lambda index: 1 / 0)" in ran.status
        assert ran.red_line.count("ZeroDivisionError: division by zero") == 1
        short(ran)
        ran = train(nb, "def f(n):\n    return f(n + 1)\nf(0)", "--cores 1")
        assert "RecursionError: maximum recursion depth exceeded" in ran.red_line
        assert re.search(r"… \d+ frames left out …", ran.status)
        assert len(ran.screen().splitlines()) < 100

    def test_a_traceback_is_shown_once_and_folded(self, nb: Kernel) -> None:
        source = """
            if rank() == 2:
                print("apart", file=sys.stderr, flush=True)
            import torch_xla.core.xla_model as xm
            xm.rendezvous("all have come")
            if rank() == 2:
                {}["other"]
            raise ValueError("bad batch")
            """
        ran = train(nb, source)
        [card] = [bundle["text/html"] for bundle in ran.cards()]
        head, folded = card.split("<details><summary>traceback</summary>")
        mine = folded.partition("</details>")[0]
        first, other = ("ValueError: bad batch", "KeyError: &#x27;other&#x27;")
        if "failed in cell" in head and other in head:
            first, other = other, first  # rank 2 was the first
        assert mine.startswith("<pre ")
        assert mine.count("Traceback (most recent call last)") == mine.count(first) == 1
        assert f'<a href="#cell-id=train">go to cell [{ran.number}], line ' in head
        assert "❯" in head
        assert "Traceback" not in head + ran.red_line
        assert "apart" in ran.stdout
        # What the others wrote is seen if it differs.
        first, other = (text.replace("&#x27;", "'") for text in (first, other))
        assert first not in ran.stdout
        assert ran.stdout.count("Traceback (most recent call last)") == ran.stdout.count(other) <= 1
        assert first in last_run(nb).log.read_text()

    def test_failure_in_a_dataloader_worker_names_the_notebook_line(self, nb: Kernel) -> None:
        """Its traceback comes as a message of many lines, with lines of the script's file."""
        ran = train(
            nb,
            """
            from torch.utils.data import DataLoader
            class Data(list):
                def __getitem__(self, index):
                    return 1 / index
            next(iter(DataLoader(Data([1, 2]), num_workers=1)))
            """,
            "--cores 1",
        )
        assert ran.red_line == (
            f"RankFailedError: rank 0 failed in cell [{ran.number}], line 6: "
            "ZeroDivisionError: Caught ZeroDivisionError in DataLoader worker process 0."
        )
        assert f"cell [{ran.number}], line 5, in __getitem__" in ran.status
        assert "script.py" not in ran.screen()
        assert ran.screen().count("Original Traceback") == 1

    def test_empty_train_cell(self, nb: Kernel) -> None:
        ran = nb.run("%%tpu_train", "train")
        assert ran.reply is not None
        assert ran.reply["status"] == "error"
        assert "UsageError: %%tpu_train: there is no code below the cell's first line" in ran.stderr
        assert nb.run("%%tpu_train --help", "train").good().stdout.startswith("usage: %%tpu_train")
        nb.client.is_complete("%%tpu_train --cores 2\n")  # as a terminal asks before it runs a cell
        assert nb.client.get_shell_msg(timeout=30)["content"]["status"] == "incomplete"
        assert "succeeded" in train(nb, "\n# nothing\n").good().status

    @pytest.mark.parametrize("magic", ["tpu_train", "tpu_debug"])
    def test_syntax_error_in_a_train_or_debug_cell(self, nb: Kernel, magic: str) -> None:
        ran = nb.run(f"%%{magic}\nx = 1\nprint(x\n", "train")
        assert ran.error is not None
        assert ran.error["ename"] == "ConversionError"
        advice = (
            ""
            if magic == "tpu_debug"
            else ". Fix the syntax error; begin shell commands with !; or tag the cell tpu-skip to "
            "leave it out of runs"
        )
        assert ran.traceback == (
            f"ConversionError: cell [{ran.number}], line 3: it is not Python: "
            f"'(' was never closed{advice}\n    print(x"
        )

    def test_lint_refuses_code_that_certainly_fails(self, nb: Kernel) -> None:
        before = len(list_runs(nb.folder / "runs"))
        old = "import torch_xla.core.xla_model as xm\nprint(xm.get_log_fn()){}"
        ran = train(nb, old.format(""))
        assert ran.error is not None
        assert ran.error["ename"] == "LintError"
        assert ran.traceback.startswith(
            f"LintError: cell [{ran.number}], line 3: `xla_model.get_log_fn` does not exist in "
            "torch_xla 2.9 [retired-name]: Print with `xla_model.master_print`"
        )
        assert "Nothing was started; to run it anyway, put `# tpunb: ignore[" in ran.traceback
        assert len(list_runs(nb.folder / "runs")) == before
        ran = train(nb, old.format("  # tpunb: ignore[retired-name]"), "--cores 1")
        assert "AttributeError: module 'torch_xla.core.xla_model'" in ran.traceback

    def test_failure_with_a_known_cause_is_explained(self, nb: Kernel) -> None:
        ran = train(nb, "if rank() == 1:\n    raise OSError(28, 'No space left on device')")
        assert "OSError: [Errno 28] No space left on device" in ran.red_line
        assert ran.status.index("raise OSError(28") < ran.status.index("\nWhy: ")
        assert ran.status.index("\nWhy: ") < ran.status.index("\nFix: ")
        nb.run("import tpunb", "import").good()
        assert nb.value("tpunb.last_run.diagnoses[0].id") == "disk-full"
        assert nb.value("tpunb.diagnose('all is well', 0)") == []

    def test_retry_and_resume_continue_from_the_last_checkpoint(self, nb: Kernel) -> None:
        source = """
            import torch, tpunb, tpunb.training.log
            found = tpunb.load()
            begun, weight = (0, torch.zeros(1)) if found is None else (found.step + 1, found["w"])
            print("begins with", begun)
            for step in range(begun, 6):
                weight = weight + 1
                tpunb.save({"w": weight}, step)
                tpunb.log(step=step, weight=weight)
                if step == 2 and rank() == 0:
                    tpunb.training.log.flush_metrics()
                    os._exit(7)
                if step == 2:
                    time.sleep(600)
            total = weight.item()
        """
        ran = train(nb, source, "--retries 1 --returns total --grace 1").good()
        assert "rank 0 ended with exit code 7" in ran.stdout
        assert "starting again (retry 1 of 1)" in ran.stdout
        assert set(re.findall(r"begins with (\d)", ran.stdout)) == {"0", "3"}
        assert nb.value("total") == 6.0
        nb.run("import tpunb", "import").good()
        assert nb.value("tpunb.last_run.attempts") == 2
        assert nb.value("tpunb.last_run.metrics().query('rank == 0')['step'].tolist()") == [
            *range(6)
        ]
        first = last_run(nb).id
        ran = train(nb, source, f"--resume {first} --cores 1 --returns total").good()
        assert "begins with 6" in ran.stdout
        assert f" · resumed from {first}, step 5 · " in ran.status
        assert nb.value("total") == 6.0
        ran = train(nb, "1 / 0", f"--resume {last_run(nb).id}")
        assert "has no checkpoint to continue from" in ran.traceback
        ran = train(nb, "import tpunb\ntpunb.save({}, 4)\n1 / 0", "--cores 1")
        assert (
            f"to continue from its last checkpoint: %%tpu_train --resume {last_run(nb).id}"
            in ran.status
        )

    def test_prelude_exception_in_the_run_only(self, nb: Kernel) -> None:
        raising = "\nif 'TPUNB_RUN' in os.environ:\n    raise OSError('no such bucket')"
        number = nb.run(PRELUDE + raising, "prelude").good().number
        ran = train(nb, "print('never')")
        assert ran.error is not None
        assert ran.red_line == (
            f"RankFailedError: re-running cell [{number}], line 4 for the ranks failed: "
            "OSError: no such bucket"
        )
        assert "raise OSError('no such bucket')" in ran.status
        assert "never" not in ran.stdout
        short(ran)


def short(ran: Ran) -> None:
    """The error is for a person: no frames of ours, IPython's or torch elastic's."""
    text = ran.screen()
    for ours in (PACKAGE, "IPython/", "ipykernel", "torch/distributed", "elastic", "runpy"):
        assert ours not in text
    assert ran.red_line


class TestInterrupts:
    """The stop button: one KeyboardInterrupt in each rank, time to save, and nothing is left."""

    @pytest.fixture(autouse=True)
    def _the_next_run_works(self, nb: Kernel) -> Iterator[None]:
        yield
        assert nb.working() == []
        assert "still works" in train(nb, "print('still works')", "--cores 2").good().stdout

    def interrupted(self, nb: Kernel, ran: Ran, *steps: str) -> list[float]:
        """The cell shows it, and these were the steps that it took; when it took them."""
        told = map(json.loads, last_run(nb).events.read_text().splitlines())
        taken = {event["step"]: event["time"] for event in told if event["event"] == "Stopping"}
        if steps[-1:] == ("SIGTERM",):
            # On a busy machine 0.4 s may be too short to end after it.
            taken.pop("SIGKILL", None)
        assert [*taken] == [*steps]
        assert ran.error is not None
        assert ran.error["ename"] == "RunInterruptedError"
        assert "stopped (interrupted in the notebook) after" in ran.red_line
        assert ran.status.startswith("stopped (interrupted in the notebook) · 3 ranks")
        assert ran.displays
        short(ran)
        return [*taken.values()]

    def test_interrupt_stops_ranks_once_with_time_to_save(self, nb: Kernel) -> None:
        source = f"""
try:
    {mark("at work")}
    time.sleep(600)
except KeyboardInterrupt:
    try:
        for _ in range(10):
            time.sleep(0.1)
        {mark("saved")}
    except KeyboardInterrupt:
        {mark("second")}
    raise
"""
        ran = nb.send(f"%%tpu_train --grace 100\n{source}", "train")
        at_work(nb, "at work")
        nb.interrupt()
        self.interrupted(nb, nb.wait(ran), "SIGINT")
        assert len(list((nb.folder / "saved").iterdir())) == 3
        assert not (nb.folder / "second").exists()


class TestSetup:
    @pytest.fixture(autouse=True)
    def _put_back(self, nb: Kernel) -> Iterator[None]:
        yield
        nb.run(f"%tpu_setup --cores 3 --runs '{nb.folder}/runs'", "load").good()

    def test_setup_notebook_option_selects_the_file(self, nb: Kernel) -> None:
        (nb.folder / "copy.ipynb").write_bytes((nb.folder / "digits.ipynb").read_bytes())
        nb.run("%tpu_setup --notebook copy.ipynb", "setup").good()
        nb.run("%cd -q /", "setup").good()
        shown = train(nb, "pass", "--dry-run").good().stdout
        assert f"notebook: {nb.folder}/copy.ipynb (from %tpu_setup --notebook)" in shown
        nb.run(f"%cd -q {nb.folder}\n%tpu_setup --notebook digits.ipynb", "setup").good()


class TestListings:
    def test_listing_of_runs_and_logs(self, nb: Kernel) -> None:
        nb.run("%tpu_setup --runs listed --cores 2", "setup").good()
        nothing = f"There are no runs in {nb.folder}/listed yet."
        assert nothing in nb.run("%tpu_runs", "list").good().screen()
        assert nb.run("%tpu_logs", "list").traceback == (
            f"TpunbError: there are no runs in {nb.folder}/listed"
        )
        train(nb, "print('first')\nprint('last', rank())", "--name good").good()
        train(nb, "1 / 0", "--name bad --no-raise --cores 1").good()
        nb.run("import tpunb", "import").good()
        assert nb.value("tpunb.runs()[['name', 'state', 'cores']].values.tolist()") == [
            ["bad", "failed", 1],
            ["good", "succeeded", 2],
        ]

        heads, bad, good = nb.run("%tpu_runs", "list").good().screen().strip().splitlines()
        assert heads.split() == ["run", "state", "cores", "time", "failure"]
        assert re.search(r"  rank 0 failed in cell \[\d+\], line 2: ZeroDivisionError: divis", bad)
        assert re.fullmatch(r"[\d-]+-good +succeeded +2 CPU +[\w ]+ s", good.strip())
        assert re.match(r"[\d-]+-bad +failed +1 CPU ", bad)

        def logs(options: str) -> list[str]:
            return nb.run(f"%tpu_logs {options}", "list").good().stdout.strip().splitlines()

        assert logs("")[-1] == "[0 err] ZeroDivisionError: division by zero"
        first, *lines = logs("good")
        assert first.startswith("[tpunb] rehearsal on CPU")
        assert sorted(lines) == ["[0] first", "[0] last 0", "[1] first", "[1] last 1"]
        assert logs("good --ranks 1 --tail 1") == ["[1] last 1"]
        assert logs("good --grep 'last.1'") == ["[1] last 1"]
        assert "regular expression" in nb.run("%tpu_logs --grep (", "list").stderr
        assert "no run in" in nb.run("%tpu_logs ugly", "list").traceback
        nb.run(f"%tpu_setup --cores 3 --runs '{nb.folder}/runs'", "setup").good()

    @pytest.mark.parametrize("name", ["tpu_train", "tpu_debug"])
    def test_line_magic_form_of_a_cell_magic_is_explained(self, nb: Kernel, name: str) -> None:
        assert f"write %%{name} (with two %) as the cell's first line" in nb.run(f"%{name}").stderr


class TestDebug:
    """`%%tpu_debug` in a kernel without %tpu_setup."""

    def test_debug_cell_shows_its_value_and_the_device_once(self, bare: Kernel) -> None:
        source = "%%tpu_debug\nimport torch_xla\ndevice = torch_xla.device()\nstr(device)"
        ran = bare.run(source).good()
        assert ran.shown == "'xla:0'"
        assert (
            ran.stdout
            == "the kernel uses XLA on CPU, so that runs can take a TPU (PJRT_DEVICE=CPU)\n"
        )
        ran = bare.run(source).good()
        assert (ran.shown, ran.stdout) == ("'xla:0'", "")
        assert bare.run("%%tpu_debug\n17;").good().value is None

    def test_debug_traceback_has_notebook_lines_only(self, bare: Kernel) -> None:
        ran = bare.run("%%tpu_debug\n\ndef half(n):\n    return 1 / n\n\ntorch_xla.launch(half)")
        text = ran.traceback
        assert "ZeroDivisionError: division by zero" in text
        assert re.search(r"-> +4 +return 1 / n", text)
        assert re.search(r"-> +6 +torch_xla.launch\(half\)", text)
        assert f"[{ran.number}]" in text
        assert PACKAGE not in text
        assert "IPython" not in text
        assert "run_cell_magic" not in text
        assert "ZeroDivisionError" in bare.run("%tb").good().screen()


def test_two_notebooks_train_at_once(nb: Kernel, bare: Kernel) -> None:
    """A run in one kernel begins and ends in the middle of a run in another."""
    waiting = (
        f"{mark('both')}\nwhile not os.path.exists('go on'):\n    time.sleep(0.05)\nprint('on')"
    )
    ran = nb.send(f"%%tpu_train\n{waiting}", "train")
    at_work(nb, "both")
    bare.run("import os").good()
    other = bare.run("%%tpu_train --cores 2\nprint('other', os.environ['RANK'])").good()
    assert {"other 0", "other 1"} == set(re.findall(r"other \d", other.stdout))
    assert bare.working() == []
    shown = " ".join(command(each.pid) for each in nb.working())
    roles = sorted(re.findall(r" tpunb: (\w+(?: \d)?) of ", shown))
    assert roles == ["prelude", "rank 0", "rank 1", "rank 2"]
    (nb.folder / "go on").touch()
    nb.wait(ran).good()
    assert "on\n" in ran.stdout
    assert nb.working() == []


def test_debug_cell_names_stay_in_the_kernel_and_out_of_runs(bare: Kernel) -> None:
    bare.run("%%tpu_debug\nonly_here = 4").good()
    assert bare.value("only_here") == 4
    ran = bare.run("%%tpu_train --cores 1\nprint('only_here' in globals())").good()
    assert "[0] False" in ran.stdout
    assert bare.value("'RANK' in __import__('os').environ") is False


def test_debug_cell_with_magics_and_shell_lines(bare: Kernel) -> None:
    ran = bare.run("%%tpu_debug\nout = !echo from the shell\n%time n = 3\n(out[0], n)").good()
    assert ran.shown == "('from the shell', 3)"


@pytest.mark.usefixtures("starts_processes")
def test_extension_reload_and_unload(tmp_path: Path) -> None:
    with kernel(tmp_path, file=None) as nb:
        nb.run("%load_ext tpunb\n%tpu_setup").good()
        before = until(
            lambda: len(found := nb.processes()) == 2 and found, "supervisor and fork server"
        )
        assert "already loaded" in nb.run("%load_ext tpunb").good().stdout
        assert nb.run("%load_ext tpunb.kernel.magics").good().screen() == ""
        assert nb.processes() == before
        assert nb.run("%reload_ext tpunb").good().screen() == ""
        assert nb.processes() == []
        nb.run("%tpu_setup").good()
        until(lambda: len(nb.processes()) == 2, "a new supervisor and fork server")
        assert nb.run("%unload_ext tpunb").good().screen() == ""
        assert nb.processes() == []
        for magic in (parser.prog for parser in PARSERS):
            cell = "\npass" if magic.startswith("%%") else ""
            assert "not found" in nb.run(f"{magic}{cell}").stderr
        nb.run("%load_ext tpunb").good()
        assert "free in" in nb.run("%tpu_setup --no-warm").good().status
        assert nb.processes() == []
