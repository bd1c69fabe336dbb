"""Packer: what arrives is what was packed, where it was said to, and no buffer is written while it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isthmus.engine.packing import ALIGN, Layout, Packer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sections() -> dict[str, NDArray[Any]]:
    return {
        "tokens": np.arange(7, dtype=np.int32),
        "items": np.arange(24, dtype=np.int32).reshape(3, 8).T,  # not contiguous
        "none": np.zeros((0, 8), np.int32),
        "positions": np.arange(5, dtype=np.int64) << 40,
        "seeds": np.array([0.5, -1.25]),
        "scale": np.array(3.5, np.float32),
        "mask": np.array([True, False, True]),
    }


@pytest.mark.parametrize("device", DEVICES)
class TestUpload:
    def test_views_hold_what_was_packed(self, device: str) -> None:
        packer = Packer(device, 4096)
        for _ in range(7):  # more than once around the ring
            views = packer.upload(sections())
            assert list(views) == list(sections())
            for name, array in sections().items():
                assert views[name].device.type == device
                assert views[name].shape == array.shape
                assert views[name].data_ptr() % ALIGN == 0
                np.testing.assert_array_equal(views[name].cpu().numpy(), array)
                assert views[name].cpu().numpy().dtype == array.dtype

    def test_the_arrays_may_change_at_once(self, device: str) -> None:
        array = np.arange(1000, dtype=np.int32)
        view = Packer(device, 1 << 16).upload({"x": array})["x"]
        array[:] = -1
        np.testing.assert_array_equal(view.cpu().numpy(), np.arange(1000))

    def test_grows_when_too_small(self, device: str) -> None:
        packer = Packer(device, 64)
        for n in (3, 100, 5000, 90_000, 2):
            values: dict[str, NDArray[Any]] = {"x": np.arange(n, dtype=np.int32), "y": np.arange(n, dtype=np.int64)}
            views = packer.upload(values)
            for name, array in values.items():
                np.testing.assert_array_equal(views[name].cpu().numpy(), array)

    def test_a_dtype_the_device_does_not_know(self, device: str) -> None:
        with pytest.raises(AssertionError, match="cannot pack an array of uint16"):
            Packer(device, 64).upload({"x": np.zeros(3, np.uint16)})


@pytest.mark.parametrize("device", DEVICES)
class TestLayout:
    def test_places_never_move(self, device: str) -> None:
        packer = Packer(device, 256)
        layout = Layout.of({"a": 40, "b": 64})
        assert layout.places == {"a": (0, 40), "b": (48, 64)}
        addresses = set()
        for n in (10, 1, 0, 10):
            packer.upload({"big": np.zeros(1000 * n, np.int32)})  # outgrows the buffer
            a, b, loose = np.arange(n, dtype=np.int32), np.arange(8, dtype=np.int64), np.arange(n * 99, dtype=np.int32)
            views = packer.upload({"loose": loose, "b": b, "a": a}, layout)
            np.testing.assert_array_equal(views["a"].cpu().numpy(), a)
            np.testing.assert_array_equal(views["b"].cpu().numpy(), b)
            np.testing.assert_array_equal(views["loose"].cpu().numpy(), loose)
            if n:
                addresses.add((views["a"].data_ptr(), views["b"].data_ptr()))
        assert len(addresses) == 1

    def test_nothing_stale_is_left_in_a_place(self, device: str) -> None:
        packer = Packer(device, 64, ring=1)
        layout = Layout.of({"a": 40})
        whole = packer.upload({"a": np.full(10, 7, np.int32)}, layout)["a"]
        packer.upload({"a": np.full(4, 9, np.int32)}, layout)
        assert whole.tolist() == [9] * 4 + [0] * 6

    def test_the_rest_of_a_place_is_what_its_layout_says(self, device: str) -> None:
        packer = Packer(device, 64, ring=1)
        layout = Layout.of({"a": 24, "b": 3, "c": 8}, {"a": -1, "b": True})
        full = {"a": np.arange(6, dtype=np.int32), "b": np.zeros(3, np.bool_), "c": np.ones(1)}
        whole = packer.upload(full, layout)
        for name, array in full.items():
            assert whole[name].tolist() == array.tolist()
        packer.upload({"a": full["a"][4:], "b": full["b"][:1], "c": full["c"][:0]}, layout)
        assert [whole[name].tolist() for name in full] == [[4, 5, -1, -1, -1, -1], [False, True, True], [0.0]]

    def test_sections_behind_the_layout_share_its_copy(self, device: str) -> None:
        packer = Packer(device, 64)
        views = packer.upload({"x": np.ones(4, np.int32), "a": np.ones(4, np.int32)}, Layout.of({"a": 40}))
        assert views["x"].data_ptr() - views["a"].data_ptr() == 48

    def test_a_section_that_outgrows_its_place(self, device: str) -> None:
        with pytest.raises(AssertionError, match="'a' has 44 bytes, its place in the layout 40"):
            Packer(device, 64).upload({"a": np.zeros(11, np.int32)}, Layout.of({"a": 40}))

    def test_a_layout_that_outgrows_the_buffer(self, device: str) -> None:
        with pytest.raises(AssertionError, match="a layout of 80 bytes in a device buffer of 64"):
            Packer(device, 64).upload({"a": np.zeros(11, np.int32)}, Layout.of({"a": 80}))

    def test_a_place_that_nobody_refreshes(self, device: str) -> None:
        with pytest.raises(AssertionError, match="section 'b' of the layout is missing"):
            Packer(device, 64).upload({"a": np.zeros(1, np.int32)}, Layout.of({"a": 16, "b": 16}))


@pytest.mark.parametrize("places", [{"a": (0, 20), "b": (16, 8)}, {"a": (8, 4)}, {"a": (0, -1)}])
def test_a_layout_with_bad_places(places: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps its neighbour or is not on 16"):
        Layout(places)


def test_a_host_buffer_is_waited_for_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    packer = Packer("cpu", 64, ring=2)
    seen: list[tuple[str, int, int]] = []

    class Spy:
        def __init__(self, index: int) -> None:
            self.index = index

        def _note(self, what: str) -> None:
            seen.append((what, self.index, int(packer._ring[self.index].array[:4].view(np.int32)[0])))

        def record(self, stream: object) -> None:
            self._note("record")

        def synchronize(self) -> None:
            self._note("wait")

    for i, staging in enumerate(packer._ring):
        staging.array[:] = 0
        staging._event = Spy(i)
    for value in (1, 2, 3):
        packer.upload({"x": np.array([value], np.int32)})
    waits = [("wait", 0, 0), ("record", 0, 1), ("wait", 1, 0), ("record", 1, 2), ("wait", 0, 1), ("record", 0, 3)]
    assert seen == waits


@pytest.mark.gpu
def test_uploads_that_run_ahead_of_the_device_arrive_in_order() -> None:
    packer = Packer("cuda", 1 << 20, ring=3)
    busy: Callable[[int], None] = torch.cuda._sleep  # cycles; only how far the device lags hangs on them
    busy(200_000_000)
    kept = []
    for i in range(12):
        kept.append(packer.upload({"x": np.full(200_000, i, np.int32)})["x"].clone())
        busy(1_000_000)
    for i, values in enumerate(kept):
        assert (values == i).all()
