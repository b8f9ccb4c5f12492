"""Commands of the `kvedge` program that measure: bench, eval, inspect, calibrate, tune, report."""

# name -> module and function of the command; the program imports a command on demand
COMMANDS = {
    "bench": "kvedge_lab.commands.bench:bench",
    "calibrate": "kvedge_lab.commands.calibrate:calibrate",
    "eval": "kvedge_lab.commands.eval:evaluate",
    "inspect": "kvedge_lab.commands.inspect:inspect",
    "report": "kvedge_lab.commands.tune:report",
    "tune": "kvedge_lab.commands.tune:tune",
}
