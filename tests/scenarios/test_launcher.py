"""Runs on real processes, from the order to the result: what works, and what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import PATIENCE, until
from tests.support import Driver, Seen, fork_server, left_below
from tpunb.kernel import launcher
from tpunb.kernel.launcher import Attached, Launcher, Run
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event, Note, Output, Phase, Stopping
from tpunb.runs.result import RunResult
from tpunb.runs.spec import FailureKind, Stop, StopCause
from tpunb.utils import processes

pytestmark = pytest.mark.usefixtures("starts_processes")


def says(text: str, ranks: int = 2) -> Callable[[Event], bool]:
    """True once this many ranks have written the text."""
    told = set()

    def heard(event: Event) -> bool:
        if isinstance(event, Output) and text in event.text:
            told.add(event.rank)
        return len(told) == ranks

    return heard


def below(driver: Driver) -> list[processes.Process]:
    """The processes under the supervisor, without those that wait for runs."""
    supervisor = driver.supervisor_pid
    return left_below(supervisor)


def said(seen: Seen, text: str) -> bool:
    """Whether a note of the run holds the text."""
    return any(text in note.text for note in seen.of(Note))


class TestThatWorks:
    def test_ranks_run_the_cell_with_the_objects_of_the_prelude(self, driver: Driver) -> None:
        seen = driver.run(
            ["import os\nvalue = [41]", "value.append(1)\nprint('prelude', os.getpid())"],
            "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sum(value))",
            ranks=3,
        )
        assert seen.result.state == "succeeded"
        assert seen.result.returncode == 0
        assert sorted(line for line in seen.log if "rank" in line) == [
            f"[{rank}] rank {rank} of 3 42" for rank in range(3)
        ]
        assert sum(line.startswith("[prelude] prelude") for line in seen.log) == 1

    def test_torchrun_environment_variables_are_set(self, driver: Driver) -> None:
        names = (
            "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE "
            "GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT "
            "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE "
            "OMP_NUM_THREADS"
        ).split()
        seen = driver.run([], f"import os\nprint([n for n in {names} if not os.environ.get(n)])")
        assert sorted(seen.log) == ["[0] []", "[1] []"]

    def test_main_module_is_like_that_of_a_plain_script(
        self, driver: Driver, tmp_path: Path
    ) -> None:
        seen = driver.run(
            [
                "from __future__ import annotations",
                "import inspect, os, pickle, signal, sys\ndef f(x: Unknown):\n    return x + 1",
            ],
            """
            main = sys.modules['__main__']
            print(__name__, main.f is f, os.path.basename(__file__), sys.argv == [__file__])
            print(pickle.loads(pickle.dumps(f)) is f, 'return x + 1' in inspect.getsource(f))
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                  sys.stdin.read() == '', os.getcwd())
            """,
            ranks=1,
            cwd=str(tmp_path),
        )
        assert seen.log == [
            "[0] __main__ True script.py True",
            "[0] True True",
            f"[0] True True {tmp_path}",
        ]

    def test_random_seeds_are_the_same_in_all_ranks(self, driver: Driver) -> None:
        draw = "(torch.rand(1).item(), numpy.random.rand(), random.random())"
        seen = driver.run(
            ["import random, numpy, torch\ntorch.manual_seed(3)"], f"print({draw})", ranks=3
        )
        assert len({line.partition("] ")[2] for line in seen.log}) == 1
        assert len(seen.log) == 3

    def test_rank_end_waits_for_threads_and_exit_handlers(self, driver: Driver) -> None:
        seen = driver.run(
            ["import atexit, threading, time"],
            """
            atexit.register(print, 'exit handler')
            threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()
            """,
            ranks=1,
        )
        assert seen.log == ["[0] thread", "[0] exit handler"]

    def test_dataloader_workers_run_in_ranks(self, driver: Driver) -> None:
        seen = driver.run(
            [
                """
                import torch
                from torch.utils.data import DataLoader, TensorDataset
                data = TensorDataset(torch.arange(10))
                """
            ],
            "print(sum(int(x.sum()) for x, in DataLoader(data, batch_size=2, num_workers=2)))",
        )
        # With one processor torch warns of two workers.
        assert sorted(line for line in seen.log if " err]" not in line) == ["[0] 45", "[1] 45"]
        assert below(driver) == []

    def test_the_log_keeps_every_line_of_every_rank(self, driver: Driver) -> None:
        seen = driver.run(
            ["import os"],
            "for i in range(25_000):\n    print(os.environ['RANK'], i)",
            ranks=4,
        )
        for rank in range(4):
            mine = [line for line in seen.log if line.startswith(f"[{rank}] ")]
            assert mine == [f"[{rank}] {rank} {i}" for i in range(25_000)]
        text = "".join(output.text for output in seen.of(Output) if output.rank == 2)
        assert text == "".join(f"2 {i}\n" for i in range(25_000))


class TestReplicate:
    """What a prelude may not do before a fork: it is found, and each rank runs the prelude."""

    def run(self, driver: Driver, prelude: str, train: str = "print('trained', ok)") -> Seen:
        seen = driver.run(["import os", prelude], train)
        assert seen.result.state == "succeeded", seen.result.explain()
        return seen

    def test_fork_after_libraries_with_background_threads(self, driver: Driver) -> None:
        """Arrow's pools and jemalloc's thread survive, tqdm's monitor is ended."""
        seen = self.run(
            driver,
            """
            import io
            import pandas as pd, pyarrow.csv
            from tqdm.auto import tqdm
            file = io.BytesIO()
            quiet = open(os.devnull, 'w')
            pd.DataFrame({'a': tqdm(range(9999), file=quiet)}).to_parquet(file)
            ok = pd.read_parquet(file).a.sum()
            """,
            """
            print('trained', pd.read_parquet(file).a.sum() == ok)
            list(tqdm(range(2), file=quiet))
            """,
        )
        assert not seen.result.replicated
        assert sorted(seen.log) == [f"[{rank}] trained True" for rank in range(2)]

    def test_prelude_uses_all_processors_and_ranks_share_them(self, driver: Driver) -> None:
        threads = "{library['num_threads'] for library in threadpool_info()}"
        seen = self.run(
            driver,
            f"""
            import numpy as np, torch
            from threadpoolctl import threadpool_info
            torch.rand(9, 9) @ torch.rand(9, 9)
            ok = {threads}
            """,
            f"print(ok, torch.get_num_threads(), {threads}, os.environ['OMP_NUM_THREADS'])",
        )
        count = len(os.sched_getaffinity(0))
        share = max(1, count // 2)
        expected = f"{{{count}}} {share} {{{share}}} {share}"
        assert sorted(seen.log) == [f"[{rank}] {expected}" for rank in range(2)]

    def test_replicate_after_a_backward_pass_in_the_prelude(self, driver: Driver) -> None:
        prelude = """
        import torch
        w = torch.ones(3, requires_grad=True)
        (w * 2).sum().backward()
        ok = True
        """
        train = """
        import torch_xla
        x = torch.ones(3, device=torch_xla.device(), requires_grad=True)
        (x * 2).sum().backward()
        print('trained', x.grad.cpu().tolist())
        """
        seen = self.run(driver, prelude, train)
        assert seen.result.replicated
        assert said(seen, "cell [2] runs a backward pass")
        assert sorted(seen.log) == [f"[{rank}] trained [2.0, 2.0, 2.0]" for rank in range(2)]
        # It is remembered: the next run of this prelude goes there directly.
        again = self.run(driver, prelude, train)
        assert again.result.replicated
        assert not [phase for phase in again.of(Phase) if "prelude, cell" in phase.text]

    def test_replicate_option_runs_the_prelude_in_every_rank(self, driver: Driver) -> None:
        seen = driver.run(
            ["import os\nprint('prelude of', os.environ['RANK'])"],
            "print('trained')",
            replicate="--replicate",
        )
        assert seen.result.replicated
        assert sorted(seen.log) == [
            "[0 prelude] prelude of 0",
            "[0] trained",
            "[1 prelude] prelude of 1",
            "[1] trained",
        ]


class TestFailures:
    """The first failing rank is named, with cell and line; the next run works."""

    @pytest.fixture(autouse=True)
    def _next_run_works(self, driver: Driver) -> Iterator[None]:
        yield
        assert below(driver) == []
        assert driver.run(["a = 1"], "print(a)").result.state == "succeeded"

    def test_exception_in_one_rank_stops_the_others(self, driver: Driver) -> None:
        seen = driver.run(
            ["import os, time\ndef check(n):\n    raise ValueError(f'got {n}')"],
            "if os.environ['RANK'] == '2':\n    check(17)\ntime.sleep(600)",
            ranks=4,
        )
        result = seen.result
        assert (result.state, result.returncode) == ("failed", 1)
        assert len(result.failures) == 1
        failure = result.failure
        assert failure is not None
        assert (failure.rank, failure.type, failure.message) == (2, "ValueError", "got 17")
        assert (failure.cell, failure.line) == (1, 3)
        assert failure.traceback.splitlines() == [
            "Traceback (most recent call last):",
            "  cell [2], line 2, in <module>",
            "    check(17)",
            "  cell [1], line 3, in check",
            "    raise ValueError(f'got {n}')",
            "ValueError: got 17",
        ]
        assert "[2 err] ValueError: got 17" in seen.log
        assert [stop.step for stop in seen.of(Stopping)] == ["SIGINT"]

    def test_crash_of_a_rank_by_a_signal_names_cell_and_line(self, driver: Driver) -> None:
        result = driver.run(
            ["import os, signal, time"],
            "print('before')\nif os.environ['RANK'] == '1':\n"
            "    os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)",
        ).result
        failure = result.failure
        assert failure is not None
        assert (failure.rank, failure.signal) == (1, "SIGSEGV")
        assert "SIGSEGV" in failure.headline()
        assert (failure.cell, failure.line) == (2, 3)
        assert len(result.failures) == 1


class TestStops:
    """One SIGINT, time to save, and nothing is left, whatever the ranks are doing."""

    def test_stop_kills_ranks_that_ignore_signals(self, driver: Driver) -> None:
        seen = driver.run(
            ["import signal, time"],
            """
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print('at work')
            time.sleep(600)
            """,
            when=says("at work"),
            then=lambda run: run.stop(Stop(StopCause.USER, "interrupted")),
            grace=0.3,
        )
        assert [stop.step for stop in seen.of(Stopping)] == ["SIGINT", "SIGTERM", "SIGKILL"]
        assert below(driver) == []


class TestReturns:
    def test_returns_values_with_tensors_on_the_cpu(self, driver: Driver) -> None:
        import torch

        result = driver.run(
            ["import os, torch, torch_xla"],
            """
            device = torch_xla.device()
            layer = torch.nn.Linear(2, 2).to(device)
            rank = int(os.environ['RANK'])
            nested = {'w': [torch.arange(3, device=device) + rank], 'n': 4}
            """,
            returns=("layer", "nested", "rank"),
        ).result
        assert result.returns_failed == {}
        assert result.returns["rank"] == 0
        assert result.returns["nested"]["n"] == 4
        assert result.returns["nested"]["w"][0].tolist() == [0, 1, 2]
        assert result.returns["layer"].weight.device == torch.device("cpu")
        assert result.returns["layer"].weight.requires_grad

    def test_returns_names_unpicklable_values_and_returns_the_rest(self, driver: Driver) -> None:
        result = driver.run(
            ["import threading"],
            "good = 1\nlock = threading.Lock()\nclass Here: pass\nhere = Here()",
            returns=("good", "lock", "missing", "here"),
        ).result
        assert result.returns == {"good": 1}
        assert "cannot be pickled" in result.returns_failed["lock"]
        assert "no variable 'missing'" in result.returns_failed["missing"]
        assert "define its class in a cell above" in result.returns_failed["here"]
        assert "lock was not returned" in result.explain()


class TestLaunchers:
    def test_warm_fork_server_is_reused_unless_the_environment_differs(
        self, tmp_path: Path
    ) -> None:
        launcher = Launcher()
        env = dict(os.environ)
        first = launcher.warm(env)
        assert launcher.warm({**env, "SOMETHING": "else"}) is first
        assert launcher.warm({**env, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}) is first
        second = launcher.warm({**env, "PYTHONHASHSEED": "7"})
        assert second is not first
        assert processes.find_process(first.pid) is None
        launcher.close()
        assert processes.find_process(second.pid) is None

    @pytest.mark.parametrize("how", ["close", "kill", "job", "stopped"])
    def test_kernel_death_ends_ranks_and_supervisor_with_time_to_save(
        self, tmp_path: Path, how: str
    ) -> None:
        """Ranks get their SIGINT, and time to save; then nothing is left.

        The lifeline closes, or every process of the job gets SIGTERM, as from Slurm, twice.
        """
        program = f"""
import sys
from pathlib import Path
from tests.support import Driver
from tests.scenarios.test_launcher import says
driver = Driver(Path({str(tmp_path)!r}))
def work(run):
    print(run.dir.path, flush=True)
driver.run(["import time\\nfrom torch.utils.data import DataLoader"], '''
try:
    batches = iter(DataLoader(range(100), num_workers=1))
    next(batches)
    print("at work")
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved")
    raise
''', when=says("at work"), then=work)
"""
        kernel = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        assert kernel.stdout is not None
        run = RunDir(kernel.stdout.readline().strip())
        everyone = processes.descendants(kernel.pid)
        assert len(left_below(everyone[0].pid)) == 5  # runner, two ranks, their workers
        for process in everyone if how == "job" else []:
            processes.send_signal(process, signal.SIGTERM)
        if how == "stopped":  # the supervisor: the fork server continues it
            processes.send_signal(everyone[0], signal.SIGSTOP)
        kernel.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        kernel.wait()
        for process in everyone if how == "job" else []:
            processes.send_signal(process, signal.SIGTERM)
        kernel.stdout.close()
        until(lambda: not any(map(processes.is_alive, everyone)), "nothing is left")
        result = run.read_result()
        assert result is not None
        assert result.state == "interrupted"
        assert result.reason == "the kernel has ended" or how == "job"
        assert sorted(run.log.read_text().splitlines())[:4] == [
            "[0] at work",
            "[0] saved",
            "[1] at work",
            "[1] saved",
        ]
        assert not run.is_running()


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def ended(run: Run | Attached) -> RunResult:
    for _ in run.events():
        continue
    return run.result()


WAITING = "print('at work')\ntime.sleep(600)"


class TestOthersAsk:
    """Through the run folder: it makes no difference who does."""

    def test_stop_from_another_process(self, driver: Driver) -> None:
        asks = "import sys; from tpunb import cli; sys.exit(cli.main(sys.argv[1:]))"
        asked: list[subprocess.Popen[str]] = []

        def stop(run: Run) -> None:
            words = ["stop", run.dir.id, "--runs", str(run.dir.path.parent)]
            asked.append(
                subprocess.Popen(
                    [sys.executable, "-c", asks, *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=os.getcwd(),
                )
            )

        seen = driver.run(["import time"], WAITING, when=says("at work"), then=stop)
        [process] = asked
        said = process.communicate(timeout=PATIENCE)[0].splitlines()
        assert process.returncode == 0
        name = seen.result.dir.name
        assert said[0] == (
            f"stopping run {name}: its ranks have 15 s to save; stop again to skip this"
        )
        assert said[1].startswith(
            f"run {name} has ended: interrupted (stopped with tpunb stop), at 2"
        )
        assert (seen.result.state, seen.result.reason) == ("interrupted", "stopped with tpunb stop")
        assert [stop.step for stop in seen.of(Stopping)] == ["SIGINT"]
        assert below(driver) == []


class TestTheQueue:
    def test_device_is_used_by_one_launcher_at_a_time(
        self, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device of these runs stands in for the chips of a TPU."""
        monkeypatch.setitem(launcher.DEVICES, "CPU", f"test-{tmp_path.name}-{os.getpid()}")
        other = Driver(tmp_path)
        other.warm()
        supervisor = other.supervisor_pid
        first, _ = other.start(["import time"], WAITING)
        until(lambda: "at work" in written(first.dir.log), "the first works")
        second, _ = driver.start([], "print('second')")
        until(lambda: state.run_state(second.dir) == "waiting", "the second waits")
        monkeypatch.setitem(launcher.DEVICES, "CPU", None)
        assert "waits" not in written(first.dir.events)
        os.kill(supervisor, signal.SIGKILL)  # with all below it; whoever waits need not know
        assert ended(second).state == "succeeded"
        told = next(event for event in second.events() if isinstance(event, Phase))
        assert told.text.startswith(f"waits for run {first.dir.id} (2 CPU cores, since ")
        assert ended(first).state == "failed"
        other.launcher.close()


def test_supervisor_log_lists_the_steps_of_a_run(driver: Driver) -> None:
    seen = driver.run(["a = 1"], "print(a)", env={"SECRET": "not in a log"})
    log = (seen.result.dir / "supervisor.log").read_text()
    steps = ["ordered", "begin", "RunnerForked", "CellStarted", "RanksForked", "RankExited"]
    places = [log.index(step) for step in [*steps, "RunnerExits", "RunFinished"]]
    assert places == sorted(places)
    assert "not in a log" not in log


def test_attach_shows_the_end_of_a_very_long_log(driver: Driver) -> None:
    """More than one look takes in of a file: the end is told after the last line."""
    seen = driver.run([], "line = 'x' * 999\nfor i in range(10_000):\n    print(line)", ranks=1)
    assert sum(len(event.text) for event in seen.events if isinstance(event, Output)) == 10_000_000
    run = Attached(RunDir(seen.result.dir))
    first, *events = run.events()
    assert isinstance(first, Note)
    assert first.text.startswith("the first 9.0 MB of output are not shown")
    shown = "".join(event.text for event in events if isinstance(event, Output))
    assert shown == ("x" * 999 + "\n") * 1000
    assert run.result() == seen.result
    assert list(run.events())[-1] == seen.events[-1]


def test_deleted_run_folder_fails_only_its_own_run(driver: Driver) -> None:
    seen = driver.run(["import os, shutil"], "shutil.rmtree(os.environ['TPUNB_RUN'])", ranks=1)
    assert seen.result.failure is not None
    assert seen.result.failure.kind is FailureKind.LOST
    assert driver.run([], "print('next')").result.state == "succeeded"


def test_ranks_have_the_umask_of_the_kernel(driver: Driver) -> None:
    mine = os.umask(0o022)
    os.umask(mine)
    seen = driver.run(["import os"], "old = os.umask(0)\nos.umask(old)\nprint(old)", ranks=1)
    assert seen.log == [f"[0] {mine}"]


def kill_fork_server(supervisor: int) -> None:
    server = fork_server(supervisor)
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)


def test_crash_of_fork_server_and_of_supervisor_during_a_run(tmp_path: Path) -> None:
    """A run survives the one, and tells of the other; the next run gets new ones."""
    driver = Driver(tmp_path)
    driver.warm()
    supervisor = driver.supervisor_pid
    seen = driver.run(
        ["import time"],
        "print('at work')\ntime.sleep(1)\nprint('through')",
        when=says("at work"),
        then=lambda run: kill_fork_server(supervisor),
    )
    assert seen.result.state == "succeeded"
    assert "[0] through" in seen.log
    seen = driver.run(
        ["import time"],
        "print('at work')\ntime.sleep(600)",
        when=says("at work"),
        then=lambda run: os.kill(supervisor, signal.SIGKILL),
    )
    assert seen.result.state == "failed"
    assert seen.result.failure is not None
    assert "the supervisor has ended" in seen.result.failure.message
    assert sorted(driver.run([], "print(1)").log) == ["[0] 1", "[1] 1"]
    driver.launcher.close()


def test_queued_run_gets_a_new_fork_server_after_a_crash(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    first, _ = driver.start(["import time"], WAITING)
    second, _ = driver.start([], "print('second')")
    until(lambda: "at work" in written(first.dir.log), "the first works")
    kill_fork_server(driver.supervisor_pid)
    first.stop(Stop(StopCause.USER, "enough"))
    assert ended(first).state == "interrupted"
    assert ended(second).state == "succeeded"
    driver.launcher.close()


def test_supervisor_that_no_later_run_can_use_ends_with_its_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    first, _ = driver.start(["import time"], WAITING)
    supervisor = driver.supervisor_pid
    until(lambda: "at work" in written(first.dir.log), "the first works")
    seen = driver.run([], "print('other')", env={"PYTHONHASHSEED": "7"})
    assert seen.result.state == "succeeded"
    assert state.run_state(first.dir) == "running"
    first.stop(Stop(StopCause.USER, "enough"))
    assert ended(first).state == "interrupted"
    driver.launcher.retire()
    assert processes.find_process(supervisor) is None
    assert driver.launcher._retired == []
    driver.launcher.close()
