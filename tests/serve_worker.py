"""Starts a server whose answers follow a grammar: serve_worker.py MODEL GRAMMAR. The grammar may be empty."""

import sys

from pykvedge import Sampling, load, plan
from pykvedge.serve.job import Limits
from pykvedge.serve.server import Options, serve

options = Options(port=0, limits=Limits(slots=2, n_ctx=2048, memory=64 << 20))
with load(sys.argv[1], threads=1) as model:
    serve(model, plan("full"), Sampling(grammar=sys.argv[2] or None), options, lambda text: None)
