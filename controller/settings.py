"""Process settings: where things are and how the process behaves. What is wanted of the fleet is in the policy.

Each setting is an environment variable `TRIMTAB_<NAME>`; a flag of the command line goes before it, an empty variable
counts as unset. A wrong value is refused with one sentence for each variable, all of them at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from controller.errors import TrimtabError

PREFIX = "TRIMTAB_"
DEFAULT_PORT = 9099
GIB = 1024**3
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """The settings of one process. Build them with `load`, which speaks plainly of what is wrong."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    policy: Path = Field(Path("fleet.yaml"), description="path of the fleet policy file")
    journal: Path = Field(
        Path("trimtab.db"), description="path of the journal, a file in a directory that survives a restart"
    )
    journal_max_bytes: int = Field(
        1 * GIB, ge=1024**2, description="size in bytes (at least 1048576) beyond which the oldest records are dropped"
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on, 127.0.0.1 for this machine only or 0.0.0.0 for every interface",
    )
    port: int = Field(
        DEFAULT_PORT,
        ge=0,
        le=65535,
        description="port to listen on, a whole number from 0 to 65535 (0 takes a free one)",
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="form of the log lines, console for people or json for machines"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least important log lines to write: debug, info, warning or error"
    )
    tick_deadline_s: Seconds = Field(
        10.0, description="seconds, more than 0, within which a tick has to read its sources"
    )
    health_limit_s: Seconds = Field(
        90.0,
        description="seconds without a heartbeat, more than the tick deadline, after which the loop counts as dead",
    )

    @field_validator("port", mode="before")
    @classmethod
    def _not_a_service_link(cls, port: object) -> object:
        # Kubernetes sets TRIMTAB_PORT=tcp://10.0.0.1:9099 in every pod beside a Service that is called `trimtab`. Such
        # a value is nobody's wish: a variable in the pod's own specification would have replaced it.
        return DEFAULT_PORT if isinstance(port, str) and port.startswith(("tcp://", "udp://", "sctp://")) else port

    @field_validator("log_format", "log_level", mode="before")
    @classmethod
    def _any_case(cls, word: object) -> object:
        return word.strip().lower() if isinstance(word, str) else word

    @model_validator(mode="after")
    def _a_slow_tick_is_not_a_dead_loop(self) -> Self:
        if self.health_limit_s <= self.tick_deadline_s:
            limit, deadline = f"{PREFIX}HEALTH_LIMIT_S", f"{PREFIX}TICK_DEADLINE_S"
            raise ValueError(
                f"{limit} is {self.health_limit_s:g} and {deadline} is {self.tick_deadline_s:g}: "
                f"a slow tick would count as a dead loop; set {limit} to more than {deadline}."
            )
        return self


def load(**flags: object) -> Settings:
    """The settings from the environment, flags that are not None before it. Raises TrimtabError, a line per fault."""
    given = {name: flag for name, flag in flags.items() if flag is not None}
    try:
        # Flags are whatever the command line parsed; the model judges them like the environment's strings.
        return Settings(**given)  # type: ignore[arg-type]  # pydantic judges the values
    except ValidationError as error:
        faults = [_sentence(fault, frozenset(given)) for fault in error.errors(include_url=False)]
        raise TrimtabError("\n".join(faults)) from error


def _sentence(fault: ErrorDetails, flags: frozenset[str]) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else ""
    field = Settings.model_fields.get(name)
    if field is None:
        return fault["msg"].removeprefix("Value error, ")
    place = f"--{name.replace('_', '-')}" if name in flags else f"{PREFIX}{name.upper()}"
    return f"{place} is {str(fault['input'])!r} and can't be used; set it to the {field.description}."
