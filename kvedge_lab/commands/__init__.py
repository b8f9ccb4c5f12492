"""Commands of the `kvedge` program that measure: bench, eval, inspect, calibrate, tune, report."""

from kvedge_lab.commands.bench import bench
from kvedge_lab.commands.calibrate import calibrate
from kvedge_lab.commands.eval import evaluate
from kvedge_lab.commands.inspect import inspect
from kvedge_lab.commands.tune import report, tune

COMMANDS = [bench, calibrate, evaluate, inspect, tune, report]
