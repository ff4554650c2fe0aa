"""The guard: keeps watch over the processes of a run, and outlives none of them.

Standard library only, and none of the user's code. It reads commands, one JSON object a line,
from its standard input, which is the kernel's lifeline: when it closes, the guard ends
everything below it and then itself. Only where its run is detached it goes on until that has
ended. It writes small state messages to its standard output:

    {"do": "warm", "env": {…}, "sys_path": […],   start the agent, which imports torch and waits,
     "processors": […]}                           with these processors
    {"do": "run", "dir": "…", "env": {…},         run what is in that run folder, after those
     "device": null, "detached": false}           before it and those that have the device
    {"do": "stop", "dir": "…", "why": "interrupt", "reason": "…", "now": false}

    {"state": "ready"}               the agent has imported everything and waits
    {"state": "ended", "dir": "…",   that run's result.json is written, none of its processes left;
     "result": null, "problem": ""}  or the result, and what the run folder could not take, and why
    {"state": "broken"}              the agent has ended: this guard cannot run anything any more

What others than the kernel ask for they write into the run folder (tpunb.control).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from typing import Any

from tpunb.models import RunResult
from tpunb.worker import processes
from tpunb.worker.jobs import Job
from tpunb.worker.outcome import Why
from tpunb.worker.supervision import Supervision

TICK = 0.02
"""Seconds between two looks at a running run: logs are merged and waits checked."""

AGENT = "import sys; sys.path[0] = sys.argv.pop(1); from tpunb.worker import agent; agent.main()"


class Lines:
    """Whole lines from a file descriptor that select says is readable."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        data = os.read(self.fd, 1 << 16)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Guard:
    """One agent, and one run at a time; others wait."""

    def __init__(self) -> None:
        self.commands = Lines(0)
        self.agent: subprocess.Popen[bytes] | None = None
        self.messages: Lines | None = None
        self.ready = False
        self.run: Supervision | None = None
        self.job: Job | None = None
        """The order that `run` carries out."""
        self.waiting: list[Job] = []
        self.leaving = ""
        """Why the guard is to end; empty while it stays."""
        self._warm: dict[str, Any] = {}
        self._umask = os.umask(0o077)  # what the guard writes is its user's alone
        self._wake, self._waker = os.pipe()
        self._agent_output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the guard)
        # What its imports leave (torch makes a folder for code that it may generate): they remove
        # it at a normal exit, and an agent has none.
        self._agent_files = tempfile.TemporaryDirectory(prefix="tpunb-", ignore_cleanup_errors=True)

    def watch(self) -> None:
        """The guard's life: until the lifeline closes, and then until nothing is left."""
        processes.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # A terminal that is closed is the lifeline's business. A handler, unlike SIG_IGN, is
        # not inherited by the agent.
        signal.signal(signal.SIGHUP, _not_heard)
        try:
            while not (self.leaving and self.run is None):
                self._wait()
                self._look_for_requests()
                if self.run is not None and self.run.step():
                    self._run_ended()
                self._next()
                if self.agent is not None and self._agent_ended(self.agent):
                    self._agent_died()
        finally:
            self._end_agent()

    def _on_sigterm(self, number: int, frame: object) -> None:
        os.write(self._waker, b"!")

    def _leave(self, reason: str) -> None:
        self.leaving = self.leaving or reason
        for job in [*([] if self.job is None else [self.job]), *self.waiting]:
            self._stop(job, "closed", reason)

    def _wait(self) -> None:
        sources = [self._wake]
        if not self.commands.closed:
            sources.append(self.commands.fd)
        if self.messages is not None and not self.messages.closed:
            sources.append(self.messages.fd)
        busy = self.run is not None or self.waiting
        readable, _, _ = select.select(sources, [], [], TICK if busy else None)
        if self._wake in readable:
            os.read(self._wake, 64)
            self._leave("the guard was told to end (SIGTERM)")
        if self.messages is not None and self.messages.fd in readable:
            for message in self.messages.read():
                self._heard(message)
        if self.commands.fd in readable:
            for command in self.commands.read():
                self._told(command)
            if self.commands.closed and not self._is_detached():
                self._leave("the kernel has ended")

    def _is_detached(self) -> bool:
        """Whether the run is to outlive the kernel."""
        return any(job.detached for job in [self.job, *self.waiting] if job is not None)

    def _say(self, **message: Any) -> None:
        # The kernel may be gone already; then nobody is left to be told.
        with contextlib.suppress(BrokenPipeError):
            os.write(1, (json.dumps(message) + "\n").encode())

    def _told(self, command: dict[str, Any]) -> None:
        if command["do"] == "warm":
            self._warm = command
            # What the kernel's thread was pinned to is not what ranks are to share.
            os.sched_setaffinity(0, command["processors"])
            self._start_agent()
        elif command["do"] == "run":
            self.waiting.append(Job(command))
            if self.leaving:
                self._leave(self.leaving)
        elif command["do"] == "stop":
            for job in [self.job, *self.waiting]:
                if job is not None and str(job.dir.path) == command["dir"]:
                    self._stop(job, command["why"], command["reason"], now=command["now"])

    def _look_for_requests(self) -> None:
        for job in [self.job, *self.waiting]:
            if job is not None:
                for reason, now in job.stops():
                    self._stop(job, "interrupt", reason, now=now)

    def _stop(self, job: Job, why: Why, reason: str, *, now: bool = False) -> None:
        if job is self.job and self.run is not None:
            self.run.stop(why, reason, now=now)
        elif job in self.waiting:
            self.waiting.remove(job)
            unwritten = job.call_off(why, reason)
            self._job_ended(job, unwritten, job.problem)

    def _next(self) -> None:
        """Begin the run whose turn it is, if one's is; the others say for whom they wait."""
        before = self.job
        for job in list(self.waiting):
            if (who := job.blocked() if before is None else before.who()) is not None:
                job.wait_for(who)
            else:
                self.waiting.remove(job)
                self._begin(job)
            before = job

    def _begin(self, job: Job) -> None:
        if self.agent is None:
            self._start_agent()
        assert self.agent is not None
        agent = processes.find(self.agent.pid)
        job.begins()
        self.job = job
        self.run = Supervision(job.dir, agent, lambda order: self._order({**order, "env": job.env}))
        if self.ready:
            self.run.begin()

    def _heard(self, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self.ready = True
            self._say(state="ready")
            if self.run is not None:
                self.run.begin()
        elif self.run is not None:
            self.run.heard(message)

    def _start_agent(self) -> None:
        reader, writer = os.pipe()
        package_root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        self.agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, package_root, str(os.getpid()), str(writer)],
            stdin=subprocess.PIPE,
            stdout=self._agent_output,
            stderr=self._agent_output,
            pass_fds=[writer],
            start_new_session=True,
            cwd="/",
            env=self._warm["env"],
            umask=self._umask,
        )
        os.close(writer)
        if self.messages is not None:
            os.close(self.messages.fd)
        self.messages = Lines(reader)
        order = {"do": "import", "sys_path": self._warm["sys_path"], "tmp": self._agent_files.name}
        self._order(order)

    def _order(self, order: dict[str, Any]) -> None:
        assert self.agent is not None and self.agent.stdin is not None
        # A dead agent is noticed, and told of, by the loop.
        with contextlib.suppress(BrokenPipeError):
            self.agent.stdin.write((json.dumps(order) + "\n").encode())
            self.agent.stdin.flush()

    def _run_ended(self) -> None:
        job, run, self.run, self.job = self.job, self.run, None, None
        assert job is not None and run is not None
        job.close()
        self._job_ended(job, run.unwritten, job.problem or run.problem)

    def _job_ended(self, job: Job, unwritten: RunResult | None, problem: str) -> None:
        result = None if unwritten is None else unwritten.to_json()
        self._say(state="ended", dir=str(job.dir.path), result=result, problem=problem)
        if job.detached:
            self.leaving = self.leaving or "its run was detached, and has ended"

    def _agent_ended(self, agent: subprocess.Popen[bytes]) -> bool:
        if self.messages is not None and self.messages.closed:
            # Its pipe closes a moment before it can be reaped, and nothing would wake us then.
            agent.wait()
        return agent.poll() is not None

    def _agent_died(self) -> None:
        assert self.agent is not None
        code, self.agent = self.agent.returncode, None
        self.ready = False
        if self.run is not None:
            self.run.lost_agent(code, self._agent_said())
        if self.waiting and not self.leaving:
            return  # those whose turn is still to come get another one
        self._say(state="broken", output=self._agent_said(), code=code)
        self.leaving = self.leaving or "the agent has ended"

    def _agent_said(self) -> str:
        size = self._agent_output.seek(0, os.SEEK_END)
        self._agent_output.seek(max(0, size - 3000))
        return self._agent_output.read().decode("utf-8", "replace").strip()

    def _end_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
        for process in processes.descendants(os.getpid()):
            processes.end(process, signal.SIGKILL)
        self._agent_files.cleanup()


def _not_heard(number: int, frame: object) -> None:
    """A signal that changes nothing."""


def main() -> None:
    """Run a guard on this process's standard input and output."""
    Guard().watch()
