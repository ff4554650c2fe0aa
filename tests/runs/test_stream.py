from __future__ import annotations

import json

import pytest

from tpunb.runs import stream
from tpunb.runs.spec import StopCause, StopOrigin
from tpunb.runs.stream import Alive, Append, End, Hello, Line, Replace, Start, Stop


@pytest.mark.parametrize(
    "line",
    [
        Hello("20261123-1-nb", 1, "h1"),
        Append("attempts/0/3/stdout.log", 17, b"\xff\x00 text\n", 1.5),
        Replace("attempts/0/3/pulse", bytes(80)),
        Replace("attempts/0/0/figure-1.png", bytes(80)),
        End(130),
        Start("ab01", {"TOKEN": "x"}, 30.0),
        Alive(),
        Stop(StopCause.USER, "enough", StopOrigin.NOTEBOOK, now=True),
    ],
)
def test_stream_lines_survive_encoding(line: Line) -> None:
    assert stream.decode(stream.encode(line)) == line


def test_stream_line_kind_is_lower_case() -> None:
    encoded = stream.encode(Append("run.log", 0, b"a\n", 2.0))
    assert json.loads(encoded) == {
        "kind": "append",
        "file": "run.log",
        "at": 0,
        "data": "YQo=",
        "time": 2.0,
    }
    assert encoded.endswith(b"\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Warning: Permanently added 'h1' to the list of known hosts.",
        "[1]",
        '{"kind": "other"}',
        '{"kind": "append", "file": "run.log", "at": 0, "time": 1.0}',
        '{"kind": "append", "file": "run.log", "at": 0, "data": "?", "time": 1.0}',
        '{"kind": "replace", "file": "../../.bashrc", "data": ""}',
        '{"kind": "replace", "file": "/etc/passwd", "data": ""}',
        '{"kind": "replace", "file": "attempts/../../x.json", "data": ""}',
        '{"kind": "replace", "file": "attempts/0/0/\\u0000.json", "data": ""}',
        '{"kind": "replace", "file": "place.json", "data": ""}',
        '{"kind": "replace", "file": "hosts/1/result.json", "data": ""}',
        '{"kind": "replace", "file": "returns/a.json", "data": ""}',
        '{"kind": "append", "file": "requests.jsonl", "at": 0, "data": "", "time": 1.0}',
        '{"kind": "append", "file": "script.py", "at": 0, "data": "", "time": 1.0}',
        '{"kind": "end", "returncode": "0"}',
    ],
)
def test_invalid_stream_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        stream.decode(text)


@pytest.mark.parametrize(
    ("file", "node_rank", "place"),
    [
        ("attempts/0/3/stdout.log", 1, "attempts/0/3/stdout.log"),
        ("attempts/0/1/error.json", 1, "hosts/1/attempts/0/1/error.json"),  # another host's rank
        ("attempts/0/3/error.json", 0, "hosts/0/attempts/0/3/error.json"),
        ("attempts/0/prelude/prelude.log", 0, "attempts/0/prelude/prelude.log"),
        ("attempts/0/prelude/prelude.log", 1, "hosts/1/attempts/0/prelude/prelude.log"),
        ("run.log", 1, "run.log"),
        ("metrics.jsonl", 2, "metrics.jsonl"),
        ("supervisor.log", 2, "hosts/2/supervisor.log"),
        ("result.json", 0, "result.json"),
        ("result.json", 2, "hosts/2/result.json"),
        ("chips.json", 1, "hosts/1/chips.json"),
        (
            "profile/plugins/profile/s/rank-3.xplane.pb",
            1,
            "profile/plugins/profile/s/rank-3.xplane.pb",
        ),
        ("profile/p/rank-1.xplane.pb", 1, "hosts/1/profile/p/rank-1.xplane.pb"),
        ("profile/p/rank-3.pt.trace.json", 1, "profile/p/rank-3.pt.trace.json"),
    ],
)
def test_file_of_a_host_has_a_path_in_the_merged_run_folder(
    file: str, node_rank: int, place: str
) -> None:
    own = range(2 * node_rank, 2 * node_rank + 2)
    assert stream.path_in_union(file, node_rank, own) == place


def test_stream_reader_joins_pieces_with_text_between() -> None:
    lines: list[Line] = [Append("run.log", 0, b"a\n", 2.0), End(0)]
    data = b"Warning: x\n" + b"\n".join(stream.encode(line) for line in lines)
    reader = stream.StreamReader(1 << 20)
    read = [said for at in range(0, len(data), 7) for said in reader.feed(data[at : at + 7])]
    assert read == ["Warning: x", lines[0], "", lines[1]]
