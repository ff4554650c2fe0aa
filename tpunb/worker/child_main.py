"""The main module of a process that a rank starts by spawn or forkserver."""

from tpunb.worker.children import become_child

become_child(globals())
del become_child
