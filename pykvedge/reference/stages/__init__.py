"""The four stages, one folder each, one file per member.

A member file defines `MEMBER`, whose `name` is what plans call it: its parameters, and the plain NumPy definition that
the native kernel is tested against. `pykvedge.plans.registry` finds the files by itself.
"""
