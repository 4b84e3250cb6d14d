"""Log lines: structlog, for people or as JSON, on standard error; standard output belongs to answers."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from controller.decisions import ActionKind, Mode
from controller.policy import FleetPolicy
from controller.policy_file import LoadedPolicy
from controller.settings import Settings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(form: Literal["console", "json"], level: str) -> None:
    """Set up the process's log lines; libraries' own warnings come out in the same form."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    before: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.dict_tracebacks if form == "json" else structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*before, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=before))
    # It tells of every request at INFO.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def started(process: Settings, loaded: LoadedPolicy, port: int) -> None:
    """Say what runs, on what, and how far it may go."""
    log = structlog.get_logger("trimtab")
    log.info(
        "started",
        policy=str(process.policy),
        sha256=loaded.sha256[:12],
        pools=len(loaded.policy.pools),
        mode=loaded.policy.mode.value,
        journal=str(process.journal),
        address=f"http://{process.host}:{port}",
    )
    for warning in loaded.warnings:
        log.warning("policy", warning=warning)
    acting = _acting(loaded.policy)
    if acting:
        log.warning(
            "mode is act, and nothing in this version can act: moves are refused, with the command to type",
            pools=", ".join(acting[:5]) + (" ..." if len(acting) > 5 else ""),
        )


def _acting(policy: FleetPolicy) -> list[str]:
    return [name for name in policy.pools if policy.mode_of(ActionKind.SCALE, name) is Mode.ACT]
