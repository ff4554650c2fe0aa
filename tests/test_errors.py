import re

from tpunb import errors


def test_the_tree_in_the_docstring_has_every_error_below_its_base() -> None:
    assert errors.__doc__ is not None
    above: list[str] = []
    drawn = set()
    for line in errors.__doc__.splitlines()[2:]:
        found = re.match(r"([│ ├└─]*)(\w+Error)", line)
        assert found is not None
        depth = len(found[1]) // 4 + bool(found[1])
        del above[depth:]
        above.append(found[2])
        drawn.add(found[2])
        error = getattr(errors, found[2])
        assert depth == 0 or error.__base__ is getattr(errors, above[-2])
    assert drawn == set(errors.__all__)
