"""The five stages: one folder per stage, one file per member.

A file has the name of its member. The file has SUMMARY, SOURCE, optionally BY_PLACE, and the NumPy definition that
native code is tested against: functions named like the fields of the member's type in base.py (`score`, `allocate`).
"""
