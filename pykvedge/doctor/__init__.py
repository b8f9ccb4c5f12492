"""The doctor tells whether kvedge is sound here: checks run in child processes, so that a crash is a finding."""
