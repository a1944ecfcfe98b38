# SPDX-License-Identifier: Apache-2.0
from typing import Any
from tests.train.pruned import train_both
import pytest

def go(sizes, cases):
    out=[]
    for c in cases:
        f=train_both(sizes,c)
        worst=max(f["differences"].items(), key=lambda kv: kv[1])
        out.append((c, worst, f["dense"]["numbers"], f["pruned"]["numbers"], f["pruned"]["losses"][-1]))
    return out

@pytest.mark.parametrize("sizes", [{"data":2},{"z":2},{"x":2},{"z":4},{"data":2,"z":2}])
def test_it(ranks: Any, sizes) -> None:
    n=1
    for v in sizes.values(): n*=v
    for r in ranks(n).run(go, sizes, [{}, {"odd":1}, {"location":"host","odd":1}, {"location":"host","step_on":"host"},{"optimizer":"tiled","index":"int32"},{"recompute":"full","dtype":"float32","clip":0.5}]):
        for line in r: print(line)
        break
