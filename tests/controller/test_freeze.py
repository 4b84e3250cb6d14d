from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.freeze import END_OF_TIME_S, frozen_until, openings
from controller.policy import Freeze


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def until(cron: str, hours: float, now: str) -> str | None:
    end = frozen_until([Freeze(cron=cron, hours=hours)], at(now), "chat")
    return None if end is None else datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M")


# 7 June 2024 is a Friday.
@pytest.mark.parametrize(
    ("now", "end"),
    [
        ("2024-06-07 21:59:59", None),
        ("2024-06-07 22:00:00", "2024-06-10 10:00"),
        ("2024-06-09 12:00:00", "2024-06-10 10:00"),
        ("2024-06-10 09:59:59", "2024-06-10 10:00"),
        ("2024-06-10 10:00:00", None),
        ("2024-06-12 22:30:00", None),
    ],
)
def test_weekend_is_frozen_from_friday_night_to_monday_morning(now: str, end: str | None) -> None:
    assert until("0 22 * * 5", 60, now) == end
    assert until("0 22 * * FRI", 60, now) == end


@pytest.mark.parametrize("sunday", ["0", "7", "sun", "SUN", "7-7", "0,7"])
def test_sunday_is_both_zero_and_seven(sunday: str) -> None:
    assert until(f"0 8 * * {sunday}", 1, "2024-06-09 08:30") == "2024-06-09 09:00"
    assert until(f"0 8 * * {sunday}", 1, "2024-06-10 08:30") is None


@pytest.mark.parametrize(
    ("weekdays", "days"),
    [
        ("1-5", "mon tue wed thu fri"),
        ("5-7", "fri sat sun"),
        ("sat-sun", "sat sun"),
        ("0-2", "mon tue sun"),
        ("*/2", "tue thu sat sun"),
        ("1-7/3", "mon thu sun"),
        ("4/2", "thu sat"),
        ("*", "mon tue wed thu fri sat sun"),
    ],
)
def test_weekdays_count_as_in_cron(weekdays: str, days: str) -> None:
    week = [datetime(2024, 6, 3, 12, 30, tzinfo=UTC) + timedelta(days=day) for day in range(7)]
    freeze = Freeze(cron=f"0 12 * * {weekdays}", hours=1)
    frozen = [f"{day:%a}".lower() for day in week if frozen_until([freeze], day.timestamp(), "chat") is not None]
    assert frozen == days.split()


def test_window_longer_than_its_period_never_ends() -> None:
    assert until("0 0 * * *", 30, "2024-06-05 23:59") == "2024-06-06 06:00"
    assert until("0 0 * * *", 30, "2024-06-06 03:00") == "2024-06-07 06:00"
    assert until("* * * * *", 8784, "2024-06-05 12:34:56") == "2025-06-06 12:34"


def test_month_and_day_rules_follow_the_calendar() -> None:
    assert until("0 0 29 2 *", 24, "2024-02-29 12:00") == "2024-03-01 00:00"
    assert until("0 0 29 2 *", 24, "2023-03-01 00:00") is None
    assert until("0 0 31 * *", 48, "2024-05-01 12:00") is None
    assert until("0 0 31 * *", 48, "2024-06-01 12:00") == "2024-06-02 00:00"
    assert until("0 0 24 dec *", 24 * 10, "2025-01-02 12:00") == "2025-01-03 00:00"


def test_restricted_day_and_weekday_are_alternatives() -> None:
    # The 13th or any Friday, as cron has it; a field that begins with a star restricts together with the other one.
    assert until("0 0 13 * 5", 24, "2024-06-13 12:00") == "2024-06-14 00:00"
    assert until("0 0 13 * 5", 24, "2024-06-07 12:00") == "2024-06-08 00:00"
    assert until("0 0 */2 * 5", 24, "2024-06-07 12:00") == "2024-06-08 00:00"
    assert until("0 0 */2 * 5", 24, "2024-06-14 12:00") is None


def test_only_named_pools_are_frozen_and_the_latest_end_counts() -> None:
    now_s = at("2024-06-07 22:30")
    freezes = [
        Freeze(cron="0 22 * * 5", hours=1, pools=["chat"]),
        Freeze(cron="0 22 * * *", hours=2, pools=["chat", "code"]),
        Freeze(cron="0 22 * * *", hours=99, pools=["other"]),
    ]
    assert frozen_until(freezes, now_s, "chat") == at("2024-06-08 00:00")
    assert frozen_until(freezes, now_s, "code") == at("2024-06-08 00:00")
    assert frozen_until(freezes, now_s, "nobody") is None
    assert frozen_until([], now_s, "chat") is None
    assert frozen_until([Freeze(cron="0 22 * * *", hours=1, pools=[])], now_s, "chat") is None


@settings(deadline=None, derandomize=True)
@given(st.floats() | st.sampled_from([0.0, END_OF_TIME_S, END_OF_TIME_S - 1, -1.0, 1e300]))
def test_any_time_is_answered(now_s: float) -> None:
    end = frozen_until([Freeze(cron="5 4 29 2 *", hours=8784)], now_s, "chat")
    assert end is None or end > now_s


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("", "has 0 fields, and 5 are wanted"),
        ("@weekly", "has 1 field,"),
        ("0 22 * *", "has 4 fields"),
        ("0 0 22 * * 5", "has 6 fields"),
        ("60 * * * *", "higher than the maximum value (59)"),
        ("* 24 * * *", "higher than the maximum value (23)"),
        ("* * 0 * *", "lower than the minimum value (1)"),
        ("* * * 13 *", "higher than the maximum value (12)"),
        ("* * * * 8", "0 and 7 are Sunday"),
        ("* * * * fry", "0 and 7 are Sunday"),
        ("* * * * 5-1", "count upwards"),
        ("* * * * */0", "count upwards"),
        ("* * */0 * *", "increment must be higher than 0"),
        ("* * last * *", "can't be read at last (day)"),
        ("* * 1st * *", "can't be read at 1st (day)"),
        ("1- * * * *", "can't be read at 1- (minute)"),
        ("* * * * ,", "can't be read at , (weekday)"),
        ("0 0 30 2 *", "never comes: no month of 2 has a day 30"),
        ("0 0 31 4,6,9,11 *", "never comes"),
    ],
)
def test_wrong_cron_expressions_are_refused_with_the_reason(cron: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
        openings(cron)
    assert reason in str(refused.value)


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="0123456789*/-,abcdefghijmnoprstuvwy ?#L", max_size=24))
def test_any_text_is_a_cron_expression_or_a_value_error(text: str) -> None:
    refusal = ""
    try:
        assert openings(text)
    except ValueError as error:
        refusal = str(error)
    assert "\n" not in refusal


NUMBERS = st.sets(st.integers(0, 30), min_size=1, max_size=6)


@settings(deadline=None, derandomize=True)
@given(
    minutes=NUMBERS,
    hours=st.sets(st.integers(0, 23), min_size=1, max_size=3),
    days=st.none() | st.sets(st.integers(1, 31), min_size=1, max_size=5),
    weekdays=st.none() | st.sets(st.integers(0, 7), min_size=1, max_size=3),
    length_h=st.floats(0.01, 60),
    now_s=st.integers(1_600_000_000, 2_000_000_000),
)
def test_newest_opening_is_the_one_found_by_looking_at_every_minute(
    minutes: set[int],
    hours: set[int],
    days: set[int] | None,
    weekdays: set[int] | None,
    length_h: float,
    now_s: int,
) -> None:
    def matches(time: datetime) -> bool:
        day = days is None or time.day in days
        weekday = weekdays is None or time.isoweekday() in weekdays or time.isoweekday() % 7 in weekdays
        either = days is not None and weekdays is not None
        return time.minute in minutes and time.hour in hours and (day or weekday if either else day and weekday)

    def field(numbers: set[int] | None) -> str:
        return "*" if numbers is None else ",".join(map(str, sorted(numbers)))

    freeze = Freeze(cron=f"{field(minutes)} {field(hours)} {field(days)} * {field(weekdays)}", hours=length_h)
    back = (now_s - now_s % 60 - 60 * ago for ago in range(int(length_h * 60) + 2))
    opened = next((start for start in back if matches(datetime.fromtimestamp(start, UTC))), None)
    end = None if opened is None else opened + length_h * 3600
    assert frozen_until([freeze], now_s, "chat") == (end if end is not None and now_s < end else None)
