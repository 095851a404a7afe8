"""Alerts: rules as written in a file, when they are told, how often; commands and webhooks are in tests/deep/monitor."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from snapshots import AT_NS, SECOND_NS, dead, sample_device, sample_lease, snapshot_of

from pagetide.common.units import GIB
from pagetide.monitor.alerts import AlertRule, Alerts
from pagetide.monitor.config import MonitorConfig
from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.snapshot import Device, LeaseUse, ProcessUse, Snapshot

DEVICE = sample_device(0)
UUID = DEVICE.info.uuid
TRUE = ("true",)


def rules(tmp_path: Path, text: str) -> tuple[AlertRule, ...]:
    file = tmp_path / "monitor.yaml"
    file.write_text(textwrap.dedent(text))
    return MonitorConfig.resolve(file, {}).alerts


def test_rules_are_read_as_they_are_written(tmp_path: Path) -> None:
    found = rules(
        tmp_path,
        """\
        alerts:
        - when: free
          below: 5%
          lasts: 10s
          command: [logger, -t, gpu]
        - {when: external, name: intruder, above: 1GiB, device: 0, every: 60, webhook: "https://example.org/hook?t=s3cret"}
        - {when: stale, command: ["true"]}
        - {when: recall, command: ["true"]}
        """,
    )
    free, external, stale, recall = found
    assert (free.title, free.below, free.lasts, free.every, free.command) == (
        "free",
        0.05,
        10.0,
        300.0,
        ("logger", "-t", "gpu"),
    )
    assert (external.title, external.above, external.device, external.every) == ("intruder", GIB, "0", 60.0)
    assert external.webhook == "https://example.org/hook?t=s3cret" and "s3cret" not in repr(external)
    assert (stale.when, recall.when) == ("stale", "recall")
    assert MonitorConfig.resolve(None, {}).alerts == () and rules(tmp_path, "alerts: []") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alerts: free", "monitor.yaml:1: alerts must be a list of rules, got 'free'"),
        ("alerts: [free]", "monitor.yaml:1: an alert is a mapping with `when:`"),
        ("alerts:\n- when: free\n- 3", "monitor.yaml:2: alert 'free' needs either a command or a webhook"),
        (
            "alerts:\n- {when: full, command: [x]}",
            "monitor.yaml:2: when must be one of free, external, stale, recall, got 'full'",
        ),
        ("alerts:\n- {when: free, command: [x]}", "below of alert 'free': `when: free` needs it"),
        ("alerts:\n- {when: stale, below: 3, command: [x]}", "monitor.yaml:2: below of alert 'stale': `when: free` needs it"),
        ("alerts:\n- {when: stale, above: 3, command: [x]}", "above of alert 'stale': only `when: external` has it"),
        ("alerts:\n- {when: free, below: 0%, command: [x]}", "monitor.yaml:2: below must be above 0%"),
        ("alerts:\n- {when: free, below: much, command: [x]}", "monitor.yaml:2: below: cannot read 'much' as an amount"),
        ("alerts:\n- {when: stale, command: rm -rf}", "monitor.yaml:2: command must be a list of a program and its arguments"),
        ("alerts:\n- {when: stale, command: []}", "command must be a list of a program and its arguments"),
        ("alerts:\n- {when: stale, webhook: 'file:///etc/passwd'}", "webhook must be an address"),
        *(
            (f"alerts:\n- {{when: stale, webhook: '{address}'}}", "webhook must be an address")
            for address in ("http://x/a b", "http://x:port/", "http:///path", "http://[::1/", "http://x/\u00e9")
        ),
        ("alerts:\n- {when: stale, command: [x], webhook: 'http://x/'}", "needs either a command or a webhook"),
        (
            "alerts:\n- {when: stale, every: 0, command: [x]}",
            "monitor.yaml:2: every must be a number of seconds from 1 to 10,000,000, got 0",
        ),
        ("alerts:\n- {when: stale, evry: 9, command: [x]}", "monitor.yaml:2: unknown setting 'evry'; did you mean every?"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        rules(tmp_path, text)
    assert said in str(refused.value)


def at(seconds: float, *devices: Device, leases: tuple[LeaseUse, ...] = (), listed_s: float = 0.0) -> Snapshot:
    """A snapshot whose processes were listed `listed_s` before it."""
    at_ns = AT_NS + int(seconds * SECOND_NS)
    listed_ns = at_ns - int(listed_s * SECOND_NS)
    listed = [replace(device, detail=replace(device.detail, at_ns=listed_ns)) for device in devices]
    return replace(snapshot_of(*listed), at_ns=at_ns).with_leases(leases)


def free(num_bytes: int, device: Device = DEVICE) -> Device:
    return replace(device, memory=replace(device.memory, free_bytes=num_bytes))


def with_processes(*uses: ProcessUse) -> Device:
    return replace(DEVICE, detail=replace(DEVICE.detail, reading=replace(DEVICE.detail.reading, processes=uses)))


def test_a_rule_is_told_once_and_once_more_when_it_has_passed() -> None:
    alerts = Alerts([AlertRule(when="free", below=2 * GIB, command=TRUE)])
    assert alerts.look(at(0, free(2 * GIB))) == []
    (alert,) = alerts.look(at(1, free(GIB)))
    assert alert.firing and alert.text == (
        "1.00 GiB free on device 0, less than 2.00 GiB; the most has llama-8b (pid 40961), 62.40 GiB"
    )
    assert alerts.look(at(2, free(GIB))) == []
    (alert,) = alerts.look(at(3, free(3 * GIB)))
    assert not alert.firing and alert.text.startswith("no longer: 1.00 GiB free on device 0")
    told = alert.to_dict(12.5, "node7")
    assert told == {
        "alert": "free", "state": "resolved", "text": f"node7: {alert.text}", "time": 12.5, "host": "node7", "device": "0",
        "device_uuid": UUID, "pid": None, "engine": None,
    }  # fmt: skip
    assert alerts._met == {}


def test_a_condition_must_last_and_a_flapping_one_is_told_at_most_once_in_a_while() -> None:
    alerts = Alerts([AlertRule(when="free", below=0.5, lasts=10, every=60, command=TRUE)])
    low, high = free(1), free(DEVICE.memory.total_bytes or 0)
    told = []
    for second in range(600):  # low for 15 s of each 20 s
        told += [(second, alert.firing) for alert in alerts.look(at(second, low if second % 20 < 15 else high))]
    assert [second for second, firing in told if firing] == [10, 70, 130, 190, 250, 310, 370, 430, 490, 550]
    assert [firing for _, firing in told] == [True, False] * 10


def test_it_waits_for_a_list_of_processes_that_names_what_took_the_memory() -> None:
    alerts = Alerts([AlertRule(when="free", below=GIB, command=TRUE)])

    def full(num_bytes: int) -> Device:
        return free(GIB // 2, with_processes(ProcessUse(7, num_bytes, command="train")))

    assert alerts.look(at(1.0, full(GIB), listed_s=0.5)) == [], "listed before the memory was taken"
    (told,) = alerts.look(at(2.0, full(9 * GIB), listed_s=0.5))
    assert told.text.endswith("the most has train (pid 7), 9.00 GiB")
    silent = Alerts(alerts.rules)
    found = [len(silent.look(at(seconds, full(GIB), listed_s=seconds))) for seconds in (1.0, 2.0, 3.0, 4.0)]
    assert found == [0, 0, 0, 1], "the list stays away"


def test_one_alert_stands_for_a_flood_of_processes() -> None:
    alerts = Alerts([AlertRule(when="external", above=GIB, every=100, command=TRUE)])
    uses = [ProcessUse(pid, 2 * GIB, user="eve", command="miner") for pid in range(1, 1001)]
    (alert,) = alerts.look(at(0, with_processes(*uses)))
    assert alert.text == "miner (pid 1, eve) holds 2.00 GiB of device 0 without a lease, and 255 more"
    for second in range(1, 100):
        assert alerts.look(at(second, with_processes(*uses))) == []
    (resolved,) = alerts.look(at(101, with_processes()))
    assert not resolved.firing and resolved.pid == 1
    assert alerts._met == {}


def test_who_holds_a_lease_is_not_external_and_the_step_is_the_default_bound() -> None:
    alerts = Alerts([AlertRule(when="external", command=TRUE)])
    lease = sample_lease("chat", 7, UUID, 40, held=3)
    assert alerts.look(at(0, with_processes(ProcessUse(7, 3 * GIB), ProcessUse(8, 1 << 20)), leases=(lease,))) == []
    (alert,) = alerts.look(at(1, with_processes(ProcessUse(7, 3 * GIB))))
    assert alert.pid == 7


def test_stale_devices_and_failed_recalls_are_told_on_their_device_alone() -> None:
    stale = AlertRule(when="stale", command=TRUE)
    other = AlertRule(when="stale", name="other", device="1", command=TRUE)
    alerts = Alerts([stale, other, AlertRule(when="recall", command=TRUE)])
    assert alerts.look(at(0, DEVICE)) == []
    (alert,) = alerts.look(at(1, DEVICE))  # its numbers are a second old
    assert (alert.rule.title, alert.text) == ("stale", "device 0 gives no new numbers")
    alerts = Alerts([stale])
    assert [alert.text for alert in alerts.look(at(0, dead(DEVICE)))] == ["device 0 cannot be read: GPU is lost"]
    alerts = Alerts([AlertRule(when="recall", command=TRUE)])
    overdue = sample_lease("chat", 7, UUID, 40, held=3, state="overdue")
    (alert,) = alerts.look(at(0, DEVICE, leases=(overdue, replace(overdue, pid=8, state="recalling"))))
    assert (alert.pid, alert.engine) == (7, "chat")
    assert alert.text == "chat (pid 7) has not given memory of device 0 back in time"


def test_new_rules_take_over_and_those_that_stay_keep_their_state() -> None:
    rule, further = (
        AlertRule(when="free", below=2 * GIB, command=TRUE),
        AlertRule(when="free", name="b", below=GIB, command=TRUE),
    )
    alerts = Alerts([rule])
    assert len(alerts.look(at(0, free(1)))) == 1
    alerts.change([rule, further])
    assert [alert.rule for alert in alerts.look(at(1, free(1)))] == [further]
    alerts.change([])
    assert alerts.look(at(2, free(1))) == [] and alerts._met == {} and alerts._told_ns == {}
