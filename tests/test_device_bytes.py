"""The bytes of a compression on a device: counted by a proxy, against the bytes that kvedge reports."""

import pytest

TOKENS, HEADS, LAYERS, SIZE = 1000, 2, 4, 64
ROWS = TOKENS * HEADS * LAYERS
# bytes from the device for each pending row of a KV head, with queries and sums of the window; its key and value in f16
# would be 256
MOST = {"snapkv": 8, "h2o": 8, "flashcache": 16, "keydiff": 16, "mixkv": 24, "lookm": 24, "kvedge": 44}
OWN_SCORER = """
import numpy as np
import pykvedge

@pykvedge.scorer("mine")
def mine(layer, settings):
    return np.linalg.norm(layer.k, axis=-1)
"""


@pytest.fixture
def travelled(native, tiny, own_server, worker):
    """travelled(plans, plugin) -> a line of device_bytes_worker.py for each plan."""
    def measured(plans, plugin=None):
        files = tiny("llama", head_size=SIZE, n_heads=HEADS, n_heads_kv=HEADS, n_layers=LAYERS)
        job = {"server": own_server.address, "model": str(files.model), "tokens": TOKENS, "plugin": plugin}
        return worker("device_bytes_worker.py", {**job, "plans": plans})

    return measured


def test_no_rows_travel_for_a_compression(travelled):
    """The report contains all bytes, except the framing."""
    full, *others = travelled([{"method": "full"}, *({"method": name, "budget": 0.2} for name in MOST)])
    assert full["report"] is None and full["rows"] == ROWS
    whole = sum(full[step][1] for step in ("read", "compress", "token"))
    wrong = []
    for (method, most), found in zip(MOST.items(), others, strict=True):
        report = found["report"]
        fetched = (sum(found[step][1] for step in ("read", "compress", "token")) - whole) / ROWS
        print(f"{method}: {fetched:.1f} bytes a row, {found}")
        sent, received = found["compress"]
        sound = (
            report is not None
            and report["compressed"]
            and not report["problem"]
            and fetched <= most
            and 0 <= received - report["fetched_bytes"] <= 16 * 1024
            # a graph is sent in some 300 bytes for each tensor
            and 0 <= sent - report["sent_bytes"] <= 1024 * report["operations"] + 64 * 1024
            and 0 < found["device_bytes"] < 0.4 * full["device_bytes"]
        )
        if not sound:
            wrong.append((method, round(fetched, 1), found))
    assert not wrong


def test_a_stage_that_has_no_graph_goes_by_the_host(travelled, tmp_path):
    """The report names the reason: a plugin's scorer, reducers that read rows differently, the critical rule."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(OWN_SCORER)
    ours = {
        "mine": {"scorer": "mine"},
        "position": {"reducer": "position"},
        "bucket": {"reducer": "bucket"},
        "critical": {"critical": "l1"},
    }
    plans = [{"method": "snapkv", "budget": 0.2, **stages} for stages in ours.values()]
    for name, found in zip(ours, travelled(plans, str(plugin)), strict=True):
        report = found["report"]
        assert not report["compressed"] and f"'{name}' has no graph" in report["problem"], found
        assert report["fetched_bytes"] >= 256 * ROWS  # and queries
        beside = found["compress"][1] - report["fetched_bytes"]
        assert beside > 0 and (beside <= 16 * 1024 or name == "critical")  # critical fetches weights
        assert found["device_bytes"] > 0  # the answer's rows are on the device again
