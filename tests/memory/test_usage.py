"""The arena's map sums to the arena and says where things are."""

from __future__ import annotations

from isthmus.memory import Pool
from tests.memory.helpers import Traffic, groups_of


def test_bytes_sum_in_every_state() -> None:
    for walls in (None, {"full": 320, "window": 640}):
        pool = Pool(1009, groups_of({"full": 2, "window": 3}), walls=walls)
        traffic = Traffic(pool, 0)
        for _ in range(30):
            traffic.allocate(4)
            traffic.release(0.3)
            usage = pool.usage()
            usage.check()
            assert usage.groups["full"].live_bytes == 32 * pool.ids("tokens").live


def test_the_picture_and_the_table() -> None:
    pool = Pool(1000 * 16, groups_of({"full": 2, "window": 3}))
    Traffic(pool, 0).grant({"full": 100, "window": 100})
    usage = pool.usage()
    picture = usage.draw(50)
    assert len(picture) == 52
    assert picture[1] == "0"
    assert picture.index("W") < picture.index(" ") < picture.index("F")
    assert f"{16000:,}" in usage.table().splitlines()[-1]
