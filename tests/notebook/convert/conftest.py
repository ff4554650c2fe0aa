from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.convert.shell import Shell


@pytest.fixture(scope="session")
def ipython(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("ipython"))
    yield shell
    shell.close()
