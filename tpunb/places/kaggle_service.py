"""Calls Kaggle's service through its own client (the package `kaggle`), with a time-out each.

The login is the client's: an access token, kaggle.json, `kaggle auth login` or variables. It is
read in this process, and never passed on.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled
from tpunb.utils import patience
from tpunb.utils.errors import MissingPackageError

PATIENCE = 60.0
"""Time-out of a request in seconds: the client itself would wait for ever."""
AGAIN = (1.0, 3.0, 10.0)
"""Seconds before each repetition of a request that may be repeated."""
POLL_INTERVAL = 0.05
"""Seconds between two checks for a cancellation."""
PAGE = 200
"""Files per page of a listing, Kaggle's maximum."""
_PIECE = 1 << 20
_BUSY = 429

_Answer = TypeVar("_Answer")


class NoAnswerError(PlaceError):
    """Kaggle cannot be reached, or has a problem of its own; it may answer later."""


@dataclass(frozen=True)
class Quota:
    """This week's quota of TPUs."""

    used: float
    """Hours used."""
    allowed: float
    """Hours of the whole week."""
    refresh: str
    """Time at which the quota is renewed."""

    @property
    def left(self) -> float:
        """Hours left."""
        return max(0.0, self.allowed - self.used)


@dataclass(frozen=True)
class Pushed:
    """A notebook that Kaggle has accepted, and runs."""

    ref: str
    """'owner/slug'."""
    invalid: tuple[str, ...]
    """Data sources that Kaggle does not know, or that this user may not read."""


@dataclass(frozen=True)
class SessionStatus:
    name: str
    """A name of Kaggle's KernelWorkerStatus: 'RUNNING'."""
    failure: str = ""

    @property
    def over(self) -> bool:
        """True if Kaggle considers the session ended."""
        return self.name in ("COMPLETE", "ERROR", "CANCEL_ACKNOWLEDGED")


@dataclass(frozen=True)
class OutputFile:
    """An output file of a session that has ended."""

    name: str
    """Path relative to /kaggle/working."""
    url: str
    """Signed URL at another host, to be treated as a secret."""


class KaggleService:
    """The requests to Kaggle that runs need."""

    def __init__(self, api: Any, cancelled: Callable[[], bool]) -> None:
        """`api`: a `KaggleApi` with a login. `cancelled`: returns True to end waits for answers."""
        self._api = api
        self._cancelled = cancelled
        self.username: str = api.config_values[api.CONFIG_NAME_USER]

    def secrets(self) -> list[str]:
        """Key and token of the login, which must not be in anything that is sent or written."""
        names = (self._api.CONFIG_NAME_KEY, self._api.CONFIG_NAME_TOKEN)
        return [value for name in names if (value := self._api.config_values.get(name))]

    def quota(self) -> Quota | None:
        """The TPU quota; None if Kaggle does not report one."""
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

        `fields`: of ApiSaveKernelRequest. After NoAnswerError the session may or may not have
        started.
        """
        from kagglesdk.kernels.types.kernels_api_service import ApiSaveKernelRequest

        request = ApiSaveKernelRequest()
        for name, value in fields.items():
            setattr(request, name, value)
        answer = self._ask(lambda client: client.save_kernel(request), again=False)
        if answer.error:
            raise PlaceError(f"Kaggle did not start the run: {answer.error}")
        ref = "/".join(answer.ref.rstrip("/").split("/")[-2:])
        invalid = (
            *(answer.invalid_dataset_sources or ()),
            *(answer.invalid_competition_sources or ()),
            *(answer.invalid_kernel_sources or ()),
            *(answer.invalid_model_sources or ()),
        )
        return Pushed(ref, invalid)

    def status(self, ref: str) -> SessionStatus | None:
        """The state of the notebook's latest session; None if there is no such notebook.

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
            # Kaggle answers 403 for missing notebooks, so that existing names cannot be guessed.
            if error.status in (403, 404):
                return None
            raise
        return SessionStatus(answer.status.name, answer.failure_message or "")

    def log(self, ref: str) -> Iterator[str]:
        """Yield the session's output from its start, as it is printed; wait without a time-out.

        Ends with Kaggle's log. Raises NoAnswerError, also if the connection is lost.
        """
        with _explained():
            try:
                for event in self._api.kernels_logs_stream(ref):
                    yield str(event.get("data", ""))
            except ValueError as error:  # the client's, for 403 and for answers that are not JSON
                raise NoAnswerError(str(error)) from None

    def outputs(self, ref: str) -> list[OutputFile]:
        """The output files of the latest session; [] while it is running."""
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
        """Call a method of the client's kernels API. Raises NoAnswerError and PlaceError."""

        def attempt() -> _Answer:
            with _explained(), self._api.build_kaggle_client() as client:
                return call(client.kernels.kernels_api_client)

        for pause in AGAIN if again else ():
            with contextlib.suppress(NoAnswerError):
                return bounded(attempt, cancelled=self._cancelled)
            _pause(pause, self._cancelled)
        return bounded(attempt, cancelled=self._cancelled)


def _pause(seconds: float, cancelled: Callable[[], bool]) -> None:
    """Wait; raise Cancelled once `cancelled` returns True."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if cancelled():
            raise Cancelled
        time.sleep(min(left, POLL_INTERVAL))


class _RefusedError(PlaceError):
    """An HTTP error that will not change if the request is repeated."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def connect(cancelled: Callable[[], bool] = lambda: False) -> KaggleService:
    """Log in to Kaggle. Raises MissingPackageError, PlaceError without a login, and Cancelled.

    Waits end with Cancelled once `cancelled` returns True.
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
        # Hide what the client prints about the login.
        with contextlib.redirect_stdout(io.StringIO()):
            service = bounded(log_in, cancelled=cancelled)
    except ImportError:
        raise MissingPackageError(
            "kaggle", "runs on Kaggle", "`pip install 'tpunb[kaggle]'`"
        ) from None
    if service is None:
        raise PlaceError(
            "you are not logged in to Kaggle on this machine: run `kaggle auth login`, or put a "
            "token from https://www.kaggle.com/settings into ~/.kaggle/access_token"
        )
    if not hasattr(service._api, "kernels_logs_stream"):
        raise MissingPackageError(
            "kaggle", "logs of runs on Kaggle", "`pip install --upgrade kaggle`, on Python 3.11"
        )
    return service


def bounded(
    call: Callable[[], _Answer],
    within: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
) -> _Answer:
    """Return a call's result. Raises NoAnswerError, or Cancelled, and abandons the call then."""
    answer = patience.start(call)
    deadline = time.monotonic() + within
    while not futures.wait([answer], POLL_INTERVAL).done:
        if cancelled():
            raise Cancelled
        if time.monotonic() > deadline:
            raise NoAnswerError(f"Kaggle has not answered in {within:g} s")
    return answer.result()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn the client's exceptions into NoAnswerError or PlaceError."""
    import requests

    try:
        yield
    except requests.HTTPError as error:
        status = 0 if error.response is None else error.response.status_code
        if status >= 500 or status == _BUSY:
            raise NoAnswerError(f"Kaggle answers with HTTP {status}") from None
        if status == 401:
            raise _RefusedError(
                "Kaggle refuses your login: `kaggle auth login` creates a new one",
                status,
            ) from None
        raise _RefusedError(f"Kaggle answers with HTTP {status}: {error}", status) from None
    except requests.RequestException as error:
        raise NoAnswerError(f"Kaggle cannot be reached ({type(error).__name__})") from None


def download(file: OutputFile, path: Path) -> None:
    """Download an output file to a path, complete or not at all. Raises NoAnswerError."""
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
            except _RefusedError as error:  # its message has the URL, which is signed
                raise PlaceError(
                    f"{file.name} could not be downloaded: HTTP {error.status}"
                ) from None
            except (requests.RequestException, NoAnswerError) as error:
                if pause is None:
                    raise NoAnswerError(
                        f"{file.name} could not be downloaded: {type(error).__name__}"
                    ) from None
                time.sleep(pause)
    finally:
        part.unlink(missing_ok=True)
