"""Rules that every method must meet: rules (rules.py), test cases (suite.py), random prompts (prompts.py).

`kvedge methods --check NAME` runs the rules on any method or stage; the project's tests run them on every built-in one.
"""
