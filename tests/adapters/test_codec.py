"""Every value of the daemon survives the codec to the bit, across versions of its classes too."""

import json
import time
from dataclasses import dataclass, replace
from enum import StrEnum

import pytest
from hypothesis import HealthCheck, given, settings
from journal_fleets import ticks
from properties.strategies import decisions, observations, states

from controller.adapters.codec import Codec, Undecodable, canonical_bytes, to_json
from controller.decisions import ActionKind, ControllerState, Decision, Expected, Mode, Move, Quadrant, Sleep, Wake
from controller.observations import Known, Observation, ReplicaState

OBSERVATIONS, DECISIONS, STATES = Codec(Observation), Codec(Decision), Codec(ControllerState)
thorough = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def assert_survives(codec, value):
    back = codec.decode(codec.encode(value), codec.layout)
    # repr tells 1 from 1.0 and 0.0 from -0.0, and finds NaN equal to itself.
    assert repr(back) == repr(value)
    assert canonical_bytes(back) == canonical_bytes(value)


@thorough
@given(observations())
def test_observations_survive_to_the_bit(observation):
    assert_survives(OBSERVATIONS, observation)


@thorough
@given(decisions())
def test_decisions_survive_to_the_bit(decision):
    assert_survives(DECISIONS, decision)


@thorough
@given(states())
def test_states_survive_to_the_bit(state):
    assert_survives(STATES, state)


def move(*actions) -> Move:
    return Move("1-a", "a", ActionKind.SLEEP, Mode.ACT, Quadrant.SHARE, actions, (), Expected(0.0))


def test_tells_apart_actions_with_equal_fields():
    decision = Decision(1, 0.0, (move(Sleep("a", ("r",)), Wake("a", ("r",)), Sleep("a", ("r",))),), (), (), ())
    back = DECISIONS.decode(DECISIONS.encode(decision), DECISIONS.layout)
    assert [type(action) for action in back.moves[0].actions] == [Sleep, Wake, Sleep]


def test_enums_come_back_as_members():
    record = next(ticks(1, 1, 1)).record
    back = OBSERVATIONS.decode(OBSERVATIONS.encode(record.observation), OBSERVATIONS.layout)
    assert back.pools[0].replicas[0].state is ReplicaState.SERVING


def test_refuses_to_write_what_it_could_not_read():
    with pytest.raises(TypeError, match="can't hold a list"):
        DECISIONS.encode(Decision(1, 0.0, (move([]),), (), (), ()))


def test_a_thousand_pools_of_four_replicas_are_written_well_under_a_second():
    tick = list(ticks(1000, 4, 2))[-1]
    state = replace(tick.after, demand=replace(tick.after.demand, rows=b""))  # rows lie beside the state
    parts = [(OBSERVATIONS, tick.record.observation), (DECISIONS, tick.record.decision), (STATES, state)]
    started_s = time.process_time()
    encoded = [codec.encode(value) for codec, value in parts]
    written_s = time.process_time() - started_s
    for (codec, value), data in zip(parts, encoded, strict=True):
        assert codec.decode(data, codec.layout) == value
    assert written_s < 1
    assert time.process_time() - started_s - written_s < 4


# ------------------------------------------------------------------------------------------------ other versions


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Square:
    side: float


@dataclass(frozen=True, slots=True)
class Circle:
    radius: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """The old version."""

    shapes: tuple[Square | Circle, ...]
    colours: tuple[Colour, ...]
    title: str


class Newer:
    """What later versions made of the drawing."""

    @dataclass(frozen=True, slots=True)
    class Grown:
        author: str = "unknown"
        shapes: tuple[Square | Circle, ...] = ()
        colours: tuple[Colour, ...] = ()
        title: str = ""
        notes: tuple[Square, ...] = ()

    @dataclass(frozen=True, slots=True)
    class Shrunk:
        title: str

    @dataclass(frozen=True, slots=True)
    class Demanding:
        title: str
        author: str

    @dataclass(frozen=True, slots=True)
    class Squares:
        shapes: tuple[Square | None, ...]


DRAWING = Drawing((Square(1.0), Circle(2.0)), (Colour.RED,), "one of each")
CODEC = Codec(Drawing)


def read_as(kind):
    return Codec(kind).decode(CODEC.encode(DRAWING), CODEC.layout)


def test_a_new_field_takes_its_default():
    assert read_as(Newer.Grown) == Newer.Grown("unknown", DRAWING.shapes, DRAWING.colours, DRAWING.title, ())


def test_a_dropped_field_is_skipped():
    assert read_as(Newer.Shrunk) == Newer.Shrunk("one of each")


def test_a_new_field_without_default_is_named():
    with pytest.raises(Undecodable, match=r"no Demanding\.author"):
        read_as(Newer.Demanding)


def test_a_union_member_that_is_no_more_is_named():
    with pytest.raises(Undecodable, match="can't be 'Circle' any more"):
        read_as(Newer.Squares)


def test_an_enum_value_that_is_no_more_is_named():
    layout = CODEC.layout
    data = CODEC.encode(Drawing((), ("green",), ""))
    with pytest.raises(Undecodable, match="Colour has no member 'green'"):
        CODEC.decode(data, layout)


@pytest.mark.parametrize("spoil", [lambda d: d[:-3], lambda d: d[:20] + b"\0" + d[21:], lambda d: b"", lambda d: b"{}"])
def test_damaged_bytes_are_undecodable(spoil):
    with pytest.raises(Undecodable):
        CODEC.decode(spoil(CODEC.encode(DRAWING)), CODEC.layout)


# --------------------------------------------------------------------------------------------------- canonical JSON


def test_canonical_json_is_strict_and_names_classes():
    value = (Known(float("nan"), float("-inf")), ReplicaState.HUNG, None, True, 3)

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(canonical_bytes(value), parse_constant=refuse) == to_json(value)
    assert to_json(value) == [{"is": "Known", "value": "NaN", "age_s": "-Infinity"}, "hung", None, True, 3]


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0.0, -0.0), (0.1 + 0.2, 0.3), (Square(1.0), Circle(1.0))])
def test_canonical_bytes_differ_where_values_do(one, other):
    assert canonical_bytes(one) != canonical_bytes(other)
