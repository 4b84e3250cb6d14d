"""From moves to the world, and the dry run that only tells; with actuators that work, refuse, break, lose answers."""

from dataclasses import dataclass, field

import pytest
from captures import fleet

from controller import act
from controller.decisions import (
    Action,
    ActionKind,
    AdmissionLimit,
    Change,
    Decision,
    Expected,
    Mode,
    Move,
    Quadrant,
    Scale,
    SetAdmission,
    ShiftWeights,
    Sleep,
    Stage,
    Wake,
    WarmCache,
    Weight,
)
from controller.errors import ActuationError
from controller.observations import Outcome, Status
from controller.policy import FleetPolicy

NOW_S = 1_790_000_000.0


def policy() -> FleetPolicy:
    """Pool "a" with a Kubernetes object to scale, pool "b" without one."""
    pool = {
        "select": {"pool": "a"},
        "model": {"name": "tiny"},
        "gpu": {"type": "CPU"},
        "replicas": {"max": 6},
        "scale": {"kind": "Deployment", "namespace": "serving", "name": "tiny-a"},
    }
    return fleet(pools={"a": pool, "b": {**pool, "select": {"pool": "b"}, "scale": None}})


def move(*actions: Action, mode: Mode = Mode.ACT, target: str = "a") -> Move:
    chain = (Change(Stage.PLANNED, 3, 5, "5 replicas for 100 calls/s"),)
    return Move(f"7-{target}", target, ActionKind.SCALE, mode, Quadrant.ADD, actions, chain, Expected(NOW_S))


def decision(*moves: Move) -> Decision:
    return Decision(7, NOW_S, moves, (), (), ())


@dataclass
class Hands:
    """An actuator that writes down what it did, and raises `error` at the action of that number."""

    error: Exception | None = None
    at: int = 0
    done: list[Action] = field(default_factory=list)

    def describe(self, action: Action) -> tuple[str, str]:
        return "", ""

    def perform(self, action: Action, deadline_s: float) -> str:
        if self.error is not None and len(self.done) == self.at:
            raise self.error
        self.done.append(action)
        return f"action {len(self.done)} is done"


# ------------------------------------------------------------------------------------------------------- dry runs


def test_a_recommendation_is_a_command_to_type_and_one_to_undo_it() -> None:
    hands = Hands()
    (outcome,) = act.perform(decision(move(Scale("a", 3, 5), mode=Mode.RECOMMEND)), policy(), hands, NOW_S)
    assert outcome == Outcome(
        "7-a",
        Status.DRY_RUN,
        NOW_S,
        "recommended, nothing was changed",
        "kubectl -n serving scale deployment/tiny-a --replicas=5",
        "kubectl -n serving scale deployment/tiny-a --replicas=3",
    )
    assert hands.done == []


def test_a_pool_without_an_object_to_scale_gets_an_instruction_instead() -> None:
    outcome = act.dry_run(move(Scale("b", 3, 1), target="b"), policy(), NOW_S)
    assert outcome.command == "# set b to 1 replica (the policy names no `scale` object for it)"
    assert "3 replicas" in outcome.undo


def test_a_pool_that_left_the_policy_can_still_be_told() -> None:
    assert "set gone to 5" in act.dry_run(move(Scale("gone", 3, 5)), policy(), NOW_S).command


WEIGHTS = (Weight("a", 0.25), Weight("b", 0.75)), (Weight("a", 0.5), Weight("b", 0.5))
LIMITS = (AdmissionLimit("gold", "new", "first", None),), (AdmissionLimit("gold", "new", "first", 8.0),)


@pytest.mark.parametrize(
    ("action", "do", "undo"),
    [
        (Sleep("a", ("r1", "r2")), "drain r1, r2 of a", "/wake_up to r1, r2"),
        (Wake("a", ("r1",)), "/wake_up to r1", "drain r1"),
        (WarmCache("a", "r1"), "hottest prefixes to r1", "nothing to undo"),
        (ShiftWeights("tiny", *WEIGHTS), "a 0.50, b 0.50", "a 0.25, b 0.75"),
        (SetAdmission("tiny", *LIMITS, tightens=True), "1 admission limits", "the 1 limits from before"),
    ],
)
def test_every_kind_of_action_can_be_told_with_its_undo(action: Action, do: str, undo: str) -> None:
    commands = act.commands(move(action), policy())
    assert do in commands[0]
    assert undo in commands[1]


def test_a_group_is_undone_in_reverse_order() -> None:
    do, undo = act.commands(move(Scale("a", 3, 5), Scale("b", 2, 1)), policy())
    assert do.index("tiny-a") < do.index("set b")
    assert undo.index("set b") < undo.index("tiny-a")


# --------------------------------------------------------------------------------------------------------- acting


def test_acting_without_an_actuator_is_refused_with_a_remedy() -> None:
    (outcome,) = act.perform(decision(move(Scale("a", 3, 5))), policy(), None, NOW_S)
    assert outcome.status is Status.REFUSED
    assert "set `mode: recommend`, or run the command" in outcome.detail
    assert outcome.command.startswith("kubectl")


def test_acting_does_all_actions_in_order() -> None:
    hands, actions = Hands(), (Scale("a", 3, 5), WarmCache("a", "r4"))
    (outcome,) = act.perform(decision(move(*actions)), policy(), hands, NOW_S)
    assert hands.done == list(actions)
    assert (outcome.status, outcome.detail) == (Status.DONE, "action 1 is done; action 2 is done")


def test_a_failure_stops_its_move_and_says_how_far_it_came() -> None:
    hands = Hands(ActuationError("403 from the API server"), at=1)
    (outcome,) = act.perform(decision(move(Scale("a", 3, 5), Scale("b", 2, 1), Sleep("a", ()))), policy(), hands, NOW_S)
    assert hands.done == [Scale("a", 3, 5)]
    assert (outcome.status, outcome.detail) == (Status.FAILED, "action 1 is done; 403 from the API server")


def test_a_lost_answer_leaves_the_outcome_unknown() -> None:
    hands = Hands(ActuationError("no answer within 10 s", outcome_unknown=True))
    (outcome,) = act.perform(decision(move(Scale("a", 3, 5))), policy(), hands, NOW_S)
    assert (outcome.status, outcome.detail) == (Status.UNKNOWN, "no answer within 10 s")


def test_a_broken_actuator_leaves_the_outcome_unknown_and_the_other_moves_alone() -> None:
    hands = Hands(KeyError("spec"))
    moves = move(Scale("a", 3, 5)), move(Scale("b", 2, 3), mode=Mode.RECOMMEND, target="b")
    broken, told = act.perform(decision(*moves), policy(), hands, NOW_S)
    assert broken.status is Status.UNKNOWN
    assert broken.detail == "the actuator broke (KeyError: 'spec'); please report this bug"
    assert told.status is Status.DRY_RUN
