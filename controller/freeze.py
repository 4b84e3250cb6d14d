"""Freeze windows: when the policy wants nothing moved.

A window opens at each time of a cron expression (UTC, minute hour day month weekday) and lasts `hours`. At time t it
is open while  o <= t < o + hours * 3600 s,  where o is the newest opening at or before t; if windows overlap, the one
that opened last ends last. Example: "0 22 * * 5" for 60 h opens on Friday 22:00 and ends on Monday 10:00, so that at
Sunday 12:00 the pool is frozen for another 22 h.

APScheduler's trigger matches the fields and walks forwards only: the newest opening is found by bisection over the
minutes of the window's length, as "is there an opening in [m, t]?" turns from yes to no exactly once as m grows. Two
rules of cron are not APScheduler's and are translated here: weekdays count from 0 = Sunday (7 is Sunday too) instead
of 0 = Monday, and a day matches if day of month *or* weekday matches, where neither field begins with a star.
Source: crontab(5) of Vixie cron.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from apscheduler.triggers.cron import CronTrigger

if TYPE_CHECKING:
    from controller.policy import Freeze

FIELDS = ("minute", "hour", "day", "month", "weekday")
END_OF_TIME_S = datetime(9998, 1, 1, tzinfo=UTC).timestamp()
"""Beyond it the calendar ends, and with it the search for openings."""

_ITEM = re.compile(r"(\*|[a-z]+|\d{1,4})(?:-([a-z]+|\d{1,4}))?(?:/(\d{1,4}))?")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


def frozen_until(freezes: Iterable[Freeze], now_s: float, pool: str) -> float | None:
    """Unix seconds at which the pool's open windows end, None outside of them; a later opening may extend it."""
    if not 0 <= now_s < END_OF_TIME_S:
        return None
    ends = []
    for freeze in freezes:
        if freeze.pools is not None and pool not in freeze.pools:
            continue
        opened = _newest_opening(freeze.cron, int(now_s // 60), math.ceil(freeze.hours * 60))
        if opened is not None:
            ends.append(opened * 60 + freeze.hours * 3600)
    return max((end for end in ends if now_s < end), default=None)


@lru_cache(maxsize=1024)
def openings(cron: str) -> tuple[CronTrigger, ...]:
    """Triggers that together fire at the times of a cron expression. Raises ValueError: one clause, with remedy."""
    fields = cron.lower().split()
    if len(fields) != len(FIELDS):
        has = f"{len(fields)} field{'' if len(fields) == 1 else 's'}"
        raise ValueError(f"has {has}, and 5 are wanted: {' '.join(FIELDS)}, such as 0 22 * * 5 for Friday 22:00")
    for field, text in zip(FIELDS, fields, strict=True):
        named = field in {"month", "weekday"}
        if not all(_ITEM.fullmatch(item) and (named or not re.search("[a-z]", item)) for item in text.split(",")):
            raise ValueError(f"can't be read at {text} ({field}); write *, 5, 1-5, */2 or 1,15")
    minute, hour, day, month, weekday = fields
    weekdays = _weekdays(weekday)
    either = not day.startswith("*") and not weekday.startswith("*")
    days = [(day, "*"), ("*", weekdays)] if either else [(day, weekdays)]
    try:
        triggers = tuple(
            CronTrigger(minute=minute, hour=hour, day=d, month=month, day_of_week=w, timezone=UTC) for d, w in days
        )
    except ValueError as error:
        reason = str(error)
        raise ValueError(f"is not a time: {reason[:1].lower()}{reason[1:]}") from error
    # Every combination of month, day and weekday that exists comes up within the next 400 years.
    if all(trigger.get_next_fire_time(None, datetime(2000, 1, 1, tzinfo=UTC)) is None for trigger in triggers):
        raise ValueError(f"never comes: no month of {month} has a day {day}")
    return triggers


def _weekdays(text: str) -> str:
    """Cron's weekdays (0 or 7 = Sunday) as APScheduler's (0 = Monday)."""
    chosen: set[int] = set()
    for item in text.split(","):
        found = _ITEM.fullmatch(item)
        first, last, step = found.groups() if found else ("", None, None)
        low = 0 if first == "*" else _weekday(first)
        high = 6 if first == "*" or (step and not last) else _weekday(last or first)
        if last == "sun":
            high = 7
        if high < low or (step is not None and int(step) == 0) or (first == "*" and last is not None):
            raise ValueError(f"can't be read at {item} (weekday); count upwards from 0 = Sunday to 7 = Sunday")
        chosen.update(day % 7 for day in range(low, high + 1, int(step or 1)))
    return ",".join(str(day) for day in sorted((day - 1) % 7 for day in chosen))


def _weekday(text: str) -> int:
    if text in _WEEKDAYS:
        return _WEEKDAYS.index(text)
    if not text.isdecimal() or int(text) > 7:
        raise ValueError(f"can't be read at {text} (weekday); write 0 to 7 (0 and 7 are Sunday) or mon to sun")
    return int(text)


@lru_cache(maxsize=4096)
def _newest_opening(cron: str, minute: int, length: int) -> int | None:
    """The newest opening in [minute - length, minute], in minutes of Unix time."""
    newest = (_newest(trigger, minute, max(minute - length, 0)) for trigger in openings(cron))
    return max((opened for opened in newest if opened is not None), default=None)


def _newest(trigger: CronTrigger, minute: int, earliest: int) -> int | None:
    low = _next(trigger, earliest)
    if low is None or low > minute:
        return None
    high = minute
    while low < high:
        middle = (low + high + 1) // 2
        opened = _next(trigger, middle)
        if opened is not None and opened <= minute:
            low = opened
        else:
            high = middle - 1
    return low


def _next(trigger: CronTrigger, minute: int) -> int | None:
    opened = trigger.get_next_fire_time(None, datetime.fromtimestamp(minute * 60, UTC))
    return None if opened is None else int(opened.timestamp()) // 60
