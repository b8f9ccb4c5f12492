"""The five stages, one folder each, one file per member.

A member is called as its file. The file has SUMMARY, SOURCE, BY_PLACE where that holds, and the plain NumPy definition
that native code is tested against: functions named as the fields of its type in base.py (`score`, `allocate`, ...).
"""
