"""More of tests/scenarios/test_places.py, which takes longer."""

from __future__ import annotations

import os
import signal

from tests.drivers.kernel import Kernel, kernel, until
from tests.drivers.places import mirrors, result_of
from tests.drivers.pods import ReachedPod
from tests.scenarios.test_places import (
    BEGUN,
    EVERY,
    GO_ON,
    _nothing_left,
    begun,
    nb,
    newest,
    pod,
    tpunb,
    train,
    variables,
    who,
)
from tpunb.runs import state
from tpunb.runs.spec import RunState, StopCause


def test_kernel_death_stops_the_hosts(pod: ReachedPod) -> None:
    with kernel(pod.project, "killed.ipynb", **variables(pod)) as made:
        made.run("%load_ext tpunb", "load").good()
        train(made, GO_ON, until_begun=4)
        run = newest(made)
        assert run is not None
        os.kill(made.pid, signal.SIGKILL)
        until(lambda: not state.run_state(run).active, "the end")
    result = result_of(run)
    assert result.stop is not None
    assert result.stop.cause is StopCause.KERNEL_GONE


def test_detached_run_is_attached_again_after_its_mirror_died(pod: ReachedPod, nb: Kernel) -> None:
    ran = train(
        nb,
        f"{BEGUN}\nwhile not os.path.exists({str(pod.folder / 'go')!r}):\n    time.sleep(0.05)\n"
        "print('went on')",
        "--detach",
    ).good()
    assert "continues without this notebook, on 4 rehearsal cores on 2 hosts" in ran.stdout
    run = newest(nb)
    assert run is not None
    until(lambda: run.log.exists() and begun(run) == 4, "ranks that have begun")
    for pid in mirrors(run):
        os.kill(pid, signal.SIGKILL)
    until(lambda: state.run_state(run) is RunState.AWAY, "nobody who follows it")
    assert "running" in tpunb(pod, "runs").stdout  # which found it again
    (pod.folder / "go").touch()
    attached = nb.run(f"%tpu_attach {run.id}").good()
    assert who(attached, "went on") == EVERY
    assert run.log.read_text().count("went on") == 4
    assert begun(run) == 4


def test_files_option_copies_only_changed_files_to_hosts(pod: ReachedPod, nb: Kernel) -> None:
    (pod.project / "data").mkdir(exist_ok=True)
    (pod.project / "data" / "numbers.txt").write_text("1 2 3")
    (pod.project / "data" / "big.bin").write_text("not this one")
    pod.set_place(cores=2, files=["data", "- *.bin"])
    body = "import os\nprint(open('data/numbers.txt').read(), sorted(os.listdir('data')))"
    ran = train(nb, body).good()
    assert who(ran, "1 2 3 ['numbers.txt']") == EVERY
    (pod.project / "data" / "numbers.txt").write_text("4 5 6 7")
    assert who(train(nb, body).good(), "4 5 6 7 ['numbers.txt']") == EVERY
