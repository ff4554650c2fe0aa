"""Kaggle's service, by its own client (the package `kaggle`), with an end to every wait.

The login is the client's: an access token, kaggle.json, `kaggle auth login` or variables. It is
read in this process, and nothing of it is passed on.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled
from tpunb.utils.errors import MissingPackageError

PATIENCE = 60.0
"""Seconds that one answer may take: the client itself would wait for ever."""
AGAIN = (1.0, 3.0, 10.0)
"""Seconds before each further try to ask what may be asked twice."""
LOOK = 0.05
"""Seconds between two looks whether somebody still waits."""
PAGE = 200
"""Files of one answer, the most that Kaggle gives."""
_PIECE = 1 << 20
_BUSY = 429

_Answer = TypeVar("_Answer")


class NoAnswerError(PlaceError):
    """Kaggle cannot be reached, or has trouble of its own: later it may answer."""


@dataclass(frozen=True)
class Quota:
    """Of TPUs, in this week."""

    used: float
    """Hours."""
    allowed: float
    """Hours."""
    refresh: str
    """The day on which there is more again."""

    @property
    def left(self) -> float:
        """Hours."""
        return max(0.0, self.allowed - self.used)


@dataclass(frozen=True)
class Pushed:
    """A notebook that Kaggle has taken, and runs."""

    ref: str
    """'owner/slug'."""
    url: str
    invalid: tuple[str, ...]
    """Data sources that it does not know, or that this user may not read."""


@dataclass(frozen=True)
class Status:
    """How a session stands."""

    name: str
    """Of Kaggle's KernelWorkerStatus: 'RUNNING'."""
    failure: str = ""

    @property
    def over(self) -> bool:
        """Whether Kaggle takes it for ended."""
        return self.name in ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")


@dataclass(frozen=True)
class OutputFile:
    """A file of a session that has ended."""

    name: str
    """Relative to /kaggle/working."""
    url: str
    """At another host; it is signed, so it may be a secret."""


class KaggleService:
    """What is asked of Kaggle for a run."""

    def __init__(self, api: Any, cancelled: Callable[[], bool]) -> None:
        """`api`: a `KaggleApi` with a login. `cancelled`: nobody waits for answers any more."""
        self._api = api
        self._cancelled = cancelled
        self.username: str = api.config_values[api.CONFIG_NAME_USER]

    def secrets(self) -> list[str]:
        """Key and token of the login, which nothing that is sent or written may hold."""
        names = (self._api.CONFIG_NAME_KEY, self._api.CONFIG_NAME_TOKEN)
        return [value for name in names if (value := self._api.config_values.get(name))]

    def quota(self) -> Quota | None:
        """Hours of TPUs; None if Kaggle says nothing of them."""
        answer = self._ask(lambda client: client.get_accelerator_quota_statistics())
        if (tpu := answer.tpu_quota) is None:
            return None
        refresh = answer.quota_refresh_time
        return Quota(
            tpu.time_used.total_seconds() / 3600,
            tpu.total_time_allowed.total_seconds() / 3600,
            "" if refresh is None else f"{refresh:%Y-%m-%d %H:%M} UTC",
        )

    def push(self, fields: Mapping[str, Any]) -> Pushed:
        """Save a notebook, which starts its session. Raises PlaceError.

        `fields`: of ApiSaveKernelRequest. After NoAnswerError nobody knows whether it has started.
        """
        from kagglesdk.kernels.types.kernels_api_service import ApiSaveKernelRequest

        request = ApiSaveKernelRequest()
        for name, value in fields.items():
            setattr(request, name, value)
        answer = self._ask(lambda client: client.save_kernel(request), again=False)
        if answer.error:
            raise PlaceError(f"Kaggle has not started the run: {answer.error}")
        ref = "/".join(answer.ref.rstrip("/").split("/")[-2:])
        invalid = (
            *(answer.invalid_dataset_sources or ()),
            *(answer.invalid_competition_sources or ()),
            *(answer.invalid_kernel_sources or ()),
            *(answer.invalid_model_sources or ()),
        )
        return Pushed(ref, answer.url, invalid)

    def status(self, ref: str) -> Status | None:
        """How the notebook's last session stands; None if there is no such notebook.

        Raises NoAnswerError.
        """
        from kagglesdk.kernels.types.kernels_api_service import ApiGetKernelSessionStatusRequest

        request = ApiGetKernelSessionStatusRequest()
        request.user_name, request.kernel_slug = ref.split("/")
        try:
            answer = self._ask(
                lambda client: client.get_kernel_session_status(request), again=False
            )
        except _RefusedError as error:
            # Kaggle says 403 of what does not exist, so that nobody learns which names do.
            if error.status in (403, 404):
                return None
            raise
        return Status(answer.status.name, answer.failure_message or "")

    def log(self, ref: str) -> Iterator[str]:
        """What the session prints, from its start, as it prints it; waits without an end.

        Raises NoAnswerError, also if the connection is lost. It ends where Kaggle's log does.
        """
        with _explained():
            try:
                for event in self._api.kernels_logs_stream(ref):
                    yield str(event.get("data", ""))
            except ValueError as error:  # the client's for 403, and for an answer that is no JSON
                raise NoAnswerError(str(error)) from None

    def outputs(self, ref: str) -> list[OutputFile]:
        """The files that the last session has left; none while it runs."""
        from kagglesdk.kernels.types.kernels_api_service import ApiListKernelSessionOutputRequest

        files: list[OutputFile] = []
        token = ""
        while True:
            request = ApiListKernelSessionOutputRequest()
            request.user_name, request.kernel_slug = ref.split("/")
            request.page_size, request.page_token = PAGE, token

            def ask(client: Any, request: Any = request) -> Any:
                return client.list_kernel_session_output(request)

            answer = self._ask(ask)
            files += [OutputFile(each.file_name, each.url) for each in answer.files or ()]
            token = answer.next_page_token
            if not token:
                return files

    def _ask(self, call: Callable[[Any], _Answer], *, again: bool = True) -> _Answer:
        """What a method of the client's kernels answers. Raises NoAnswerError and PlaceError."""

        def attempt() -> _Answer:
            with _explained(), self._api.build_kaggle_client() as client:
                return call(client.kernels.kernels_api_client)

        for pause in AGAIN if again else ():
            with contextlib.suppress(NoAnswerError):
                return bounded(attempt, cancelled=self._cancelled)
            time.sleep(pause)
        return bounded(attempt, cancelled=self._cancelled)


class _RefusedError(PlaceError):
    """An answer of HTTP that will be no other with the next try."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def connect(cancelled: Callable[[], bool] = lambda: False) -> KaggleService:
    """Kaggle for who is logged in. Raises MissingPackageError, PlaceError without a login.

    Once `cancelled` says so, nothing more is waited for: Cancelled.
    """

    def log_in() -> KaggleService | None:
        with _explained():
            from kaggle.api.kaggle_api_extended import KaggleApi

            api = KaggleApi()
            try:
                api.authenticate()
            except SystemExit:
                return None
            return KaggleService(api, cancelled)

    try:
        # The client prints what it thinks of the login, and how to get one.
        with contextlib.redirect_stdout(io.StringIO()):
            service = bounded(log_in, cancelled=cancelled)
    except ImportError:
        raise MissingPackageError(
            "kaggle", "runs on Kaggle", "`pip install 'tpunb[kaggle]'`"
        ) from None
    if service is None:
        raise PlaceError(
            "Kaggle's client has no login here: `kaggle auth login` makes one, or a token from "
            "https://www.kaggle.com/settings in ~/.kaggle/access_token"
        )
    if not hasattr(service._api, "kernels_logs_stream"):
        raise MissingPackageError(
            "kaggle", "logs of runs on Kaggle", "`pip install --upgrade kaggle`, on Python 3.11"
        )
    return service


def bounded(
    call: Callable[[], _Answer],
    patience: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
) -> _Answer:
    """What a call answers in time. Raises NoAnswerError, Cancelled: the call is left to itself."""
    box: queue.SimpleQueue[tuple[_Answer | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            box.put((call(), None))
        except BaseException as error:  # raised where it is waited for
            box.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    deadline = time.monotonic() + patience
    while True:
        try:
            answer, error = box.get(timeout=LOOK)
            break
        except queue.Empty:
            if cancelled():
                raise Cancelled from None
            if time.monotonic() > deadline:
                raise NoAnswerError(f"Kaggle has not answered in {patience:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what the client raises into NoAnswerError or PlaceError."""
    import requests

    try:
        yield
    except requests.HTTPError as error:
        status = 0 if error.response is None else error.response.status_code
        if status >= 500 or status == _BUSY:
            raise NoAnswerError(f"Kaggle answers with HTTP {status}") from None
        if status == 401:
            raise _RefusedError(
                "Kaggle refuses the login of its client: `kaggle auth login` makes a new one",
                status,
            ) from None
        raise _RefusedError(f"Kaggle answers with HTTP {status}: {error}", status) from None
    except requests.RequestException as error:
        raise NoAnswerError(f"Kaggle cannot be reached ({type(error).__name__})") from None


def download(file: OutputFile, path: Path) -> None:
    """Write an output file to a path, and nothing before all is here. Raises NoAnswerError."""
    import requests

    part = path.with_name(f".{path.name}.part")
    try:
        for pause in (*AGAIN, None):
            try:
                with requests.get(file.url, stream=True, timeout=PATIENCE) as answer, _explained():
                    answer.raise_for_status()
                    with open(part, "wb") as target:
                        for piece in answer.iter_content(_PIECE):
                            target.write(piece)
                    length = answer.headers.get("Content-Length")
                    encoded = "Content-Encoding" in answer.headers
                    if length and not encoded and part.stat().st_size != int(length):
                        raise NoAnswerError("the connection was lost")
                part.replace(path)
                return
            except _RefusedError as error:  # its words have the URL, which is signed
                raise PlaceError(f"{file.name} has not come: HTTP {error.status}") from None
            except (requests.RequestException, NoAnswerError) as error:
                if pause is None:
                    raise NoAnswerError(
                        f"{file.name} has not come: {type(error).__name__}"
                    ) from None
                time.sleep(pause)
    finally:
        part.unlink(missing_ok=True)
