"""Plugins bring stages from outside: a decorated function, a file, an entry point, or a shared library.

`decorators` registers, `table` remembers, `installed` finds entry points, `calling` runs what was registered
and checks what comes back. Their import loads no plugin.
"""
