"""Counting units, the notifications that name them, and the bounded memory of what ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.transfer import notifications
from dynrt.transfer.bounded import BoundedDict
from dynrt.transfer.notifications import MalformedNotificationError, SenderQuiesced, UnitsWritten
from dynrt.transfer.units import UnitRange, UnitSet

NUM_ROUTES, NUM_LAYERS, NUM_PIECES = 2, 3, 5

keys = st.binary(min_size=16, max_size=16)
epochs = st.integers(0, 2**32 - 1)


@st.composite
def unit_ranges(draw: st.DrawFn) -> UnitRange:
    first_layer = draw(st.integers(0, NUM_LAYERS - 1))
    first_piece = draw(st.integers(0, NUM_PIECES - 1))
    return UnitRange(
        draw(st.integers(0, NUM_ROUTES - 1)),
        first_layer,
        draw(st.integers(1, NUM_LAYERS - first_layer)),
        first_piece,
        draw(st.integers(1, NUM_PIECES - first_piece)),
    )


def members(units: UnitRange) -> set[tuple[int, int, int]]:
    return {
        (units.route, layer, piece)
        for layer in range(units.first_layer, units.first_layer + units.num_layers)
        for piece in range(units.first_piece, units.first_piece + units.num_pieces)
    }


@given(st.lists(unit_ranges()))
def test_each_unit_counts_once_in_any_order_and_overlap(ranges: list[UnitRange]) -> None:
    units = UnitSet(NUM_ROUTES, NUM_LAYERS, NUM_PIECES)
    seen: set[tuple[int, int, int]] = set()
    for reported in ranges:
        units.add(reported)
        seen |= members(reported)
        assert units.missing == NUM_ROUTES * NUM_LAYERS * NUM_PIECES - len(seen)


@pytest.mark.parametrize(
    "outside",
    [UnitRange(2, 0, 1, 0, 1), UnitRange(0, 2, 2, 0, 1), UnitRange(0, 0, 1, 4, 2)],
    ids=["route", "layer", "piece"],
)
def test_units_outside_the_reservation_are_an_error(outside: UnitRange) -> None:
    with pytest.raises(ValueError, match="lies outside 2 routes of 5 pieces"):
        UnitSet(NUM_ROUTES, NUM_LAYERS, NUM_PIECES).add(outside)


@given(keys, epochs, unit_ranges())
def test_a_written_notification_comes_out_as_it_went_in(key: bytes, epoch: int, units: UnitRange) -> None:
    packed = notifications.encode_written(key, epoch, units)
    assert len(packed) == notifications.NOTIFICATION_BYTES
    assert notifications.decode(packed) == UnitsWritten(key, epoch, units)


@given(keys, epochs, unit_ranges(), st.data())
def test_checksums_travel_behind_it_one_for_each_unit(
    key: bytes, epoch: int, units: UnitRange, data: st.DataObject
) -> None:
    num_units = units.num_layers * units.num_pieces
    checksums = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=num_units, max_size=num_units))
    packed = notifications.encode_written(key, epoch, units, checksums)
    assert notifications.decode(packed) == UnitsWritten(key, epoch, units, tuple(checksums))
    if num_units:
        with pytest.raises(MalformedNotificationError, match="bytes of checksums"):
            notifications.decode(packed + b"0")


@given(keys, epochs, st.booleans())
def test_a_quiesced_notification_comes_out_as_it_went_in(key: bytes, epoch: int, clean: bool) -> None:
    packed = notifications.encode_quiesced(key, epoch, clean=clean)
    assert len(packed) == notifications.NOTIFICATION_BYTES
    assert notifications.decode(packed) == SenderQuiesced(key, epoch, clean)


@given(st.binary(max_size=60).filter(lambda packed: len(packed) != 40 or packed[0] not in (1, 2)))
def test_foreign_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedNotificationError, match="expected"):
        notifications.decode(packed)


def test_a_bounded_dict_forgets_the_oldest() -> None:
    remembered: BoundedDict[int, str] = BoundedDict(2)
    for key in (1, 2, 1, 3):
        remembered[key] = "x"
    assert list(remembered) == [2, 3]
