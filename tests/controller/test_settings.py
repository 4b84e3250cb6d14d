import os
import subprocess
import sys

from controller import settings

SETTINGS = """
import sys
from controller import settings
from controller.errors import TrimtabError
try:
    {}
except TrimtabError as error:
    sys.exit(str(error))
"""


def read_settings(expression: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Settings as a process of its own reads them from its environment."""
    return subprocess.run(
        [sys.executable, "-c", SETTINGS.format(expression)],
        env={name: text for name, text in os.environ.items() if not name.startswith("TRIMTAB_")} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_settings_come_from_flags_then_environment_then_defaults():
    shown = read_settings(
        "s = settings.load(port=8000, host=None); print(s.port, s.host, s.policy, s.log_format, s.journal)",
        TRIMTAB_PORT="9000",
        TRIMTAB_HOST="0.0.0.0",
        TRIMTAB_POLICY="/etc/trimtab/fleet.yaml",
        TRIMTAB_LOG_FORMAT="JSON",
        TRIMTAB_JOURNAL="",
    )
    assert shown.stdout.split() == ["8000", "0.0.0.0", "/etc/trimtab/fleet.yaml", "json", "trimtab.db"]


def test_each_bad_variable_gets_one_plain_sentence():
    refused = read_settings(
        "settings.load(log_level='loud')", TRIMTAB_PORT="70000", TRIMTAB_TICK_DEADLINE_S="nan", TRIMTAB_LOG_FORMAT="xml"
    )
    assert refused.returncode == 1
    said = [line.partition(" and can't be used; set it to the ") for line in refused.stderr.splitlines()]
    assert {place: remedy for place, _, remedy in said} == {
        "TRIMTAB_PORT is '70000'": "port to listen on, a whole number from 0 to 65535 (0 takes a free one).",
        "TRIMTAB_LOG_FORMAT is 'xml'": "form of the log lines, console for people or json for machines.",
        "--log-level is 'loud'": "least important log lines to write: debug, info, warning or error.",
        "TRIMTAB_TICK_DEADLINE_S is 'nan'": "seconds, more than 0, within which a tick has to read its sources.",
    }


def test_a_health_limit_below_the_tick_deadline_is_refused():
    refused = read_settings("settings.load()", TRIMTAB_HEALTH_LIMIT_S="5")
    assert refused.stderr == (
        "TRIMTAB_HEALTH_LIMIT_S is 5 and TRIMTAB_TICK_DEADLINE_S is 10: a slow tick would count as a dead loop; "
        "set TRIMTAB_HEALTH_LIMIT_S to more than TRIMTAB_TICK_DEADLINE_S.\n"
    )


def test_the_port_variable_of_a_kubernetes_service_link_is_not_taken_for_a_setting():
    assert read_settings("print(settings.load().port)", TRIMTAB_PORT="tcp://10.0.0.1:9099").stdout == "9099\n"


def test_every_setting_is_described():
    assert all(field.description for field in settings.Settings.model_fields.values())
