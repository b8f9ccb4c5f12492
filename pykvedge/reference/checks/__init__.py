"""What every method must hold to: rules (rules.py), cases they are tried on (suite.py), random prompts (prompts.py).

`kvedge methods --check NAME` runs them on any method or stage, and the project's own tests on every one it has.
"""
