"""Whether kvedge is sound on this machine: checks that run in child processes, so that a crash is a finding."""
