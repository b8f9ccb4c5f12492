"""The doctor checks whether kvedge works here. Checks run in child processes, so a crash is a finding."""
