"""Commands of the `kvedge` program that measure: bench, eval, inspect, calibrate."""

from kvedge_lab.commands.bench import bench
from kvedge_lab.commands.calibrate import calibrate
from kvedge_lab.commands.eval import evaluate
from kvedge_lab.commands.inspect import inspect

COMMANDS = [bench, calibrate, evaluate, inspect]
