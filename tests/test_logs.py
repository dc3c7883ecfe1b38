"""A library prints nothing on its own."""

import logging

import pytest
import structlog
from structlog.testing import capture_logs

from sdcontrol.cli import main
from sdcontrol.logs import EventLog


def test_changes_of_state_are_silent_until_somebody_listens(
    capfd: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()
    EventLog("sdcontrol.test").info("state_changed", step=3)
    assert capfd.readouterr() == ("", "")


def test_standard_logging_hears_events_with_their_facts(caplog: pytest.LogCaptureFixture) -> None:
    structlog.reset_defaults()
    with caplog.at_level(logging.INFO, "sdcontrol.test"):
        EventLog("sdcontrol.test").info("state_changed", step=3)
    assert caplog.messages == ["state_changed step=3"]


def test_an_application_that_configured_structlog_hears_events() -> None:
    with capture_logs() as events:
        EventLog("sdcontrol.test").warning("drafter_quarantined", family="x")
    structlog.reset_defaults()
    assert events == [{"event": "drafter_quarantined", "family": "x", "log_level": "warning"}]


@pytest.mark.parametrize(
    "kind",
    [
        structlog.BoundLogger,
        structlog.stdlib.BoundLogger,
        structlog.make_filtering_bound_logger(logging.INFO),
    ],
)
def test_loggers_of_every_kind_that_an_application_may_choose_take_events(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.configure(wrapper_class=kind, processors=[structlog.processors.JSONRenderer()])
    for level in ("info", "warning"):
        getattr(EventLog("sdcontrol.test"), level)("state_changed", step=3)
    structlog.reset_defaults()
    assert capsys.readouterr().out.splitlines() == ['{"step": 3, "event": "state_changed"}'] * 2


@pytest.mark.parametrize("was_configured", [False, True])
def test_a_command_leaves_logging_as_it_was(was_configured: bool) -> None:
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(processors=[])
    assert main(["advise", "--hardware", "none such"]) == 2
    assert structlog.is_configured() == was_configured
    assert (structlog.get_config()["processors"] == []) == was_configured
    structlog.reset_defaults()
