from tpunb.notebook.models import Script
from tpunb.runs.spec import Block


def test_a_script_knows_where_its_lines_come_from() -> None:
    text = "# head\na = 1\nb = 2\nprint(a)\n"
    blocks = (Block("header", 1, 1), Block("prelude", 2, 3, 0, 4), Block("train", 4, 4, 1, 9))
    script = Script(text, blocks)
    assert script.locate(1) is None
    assert script.locate(3) == (blocks[1], 2)
    assert script.source(blocks[1]) == "a = 1\nb = 2\n"
    assert script.locate(5) is None
